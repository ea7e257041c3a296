"""try: python campaign.py quick"""

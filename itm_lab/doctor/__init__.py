"""``itm doctor``: is this machine ready, and does its GPU compute what the book computes?"""

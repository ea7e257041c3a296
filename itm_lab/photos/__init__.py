"""Your own folder: photographs and captions to the precomputed format, and search with a trained model.

Nothing heavy is imported here: ``itm --help`` stays quick.
"""

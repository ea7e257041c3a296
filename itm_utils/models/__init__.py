# Generated from notebooks/ by `itm export`: edit the notebooks, not this file.

"""The models of the book, one module a chapter.

No chapter exports anything yet.
"""

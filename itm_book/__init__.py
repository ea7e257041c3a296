"""How the book is made: exporter, notebook rules and runs, launch copies, the build.

Kept apart from ``itm_utils``, which is what chapters and readers import.
"""

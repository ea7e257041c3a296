"""What the book measures, and the code that measures it: ``python -m benchmarks`` (``make bench``) runs every ratio."""

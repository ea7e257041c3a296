"""Real datasets on the way to the precomputed format: what is there, where to get the rest, how to convert it."""

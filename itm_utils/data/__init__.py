"""Data as models read it: the precomputed format, captions, text encoders, phrases with boxes, batches."""

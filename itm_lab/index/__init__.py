"""An index on disk: one vector per image or caption, searched by faiss, in segments that are written once."""

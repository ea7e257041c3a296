"""Reference cases of public implementations, and adapters for their checkpoints."""

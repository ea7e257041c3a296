"""Experiments: their files, the parameters of a chapter, the runner and the cost estimate."""

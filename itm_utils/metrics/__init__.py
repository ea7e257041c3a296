"""Retrieval metrics, metrics with several positives, and attention precision, recall and F1."""

"""All that runs, records, judges and publishes the book. Chapters build models from :mod:`itm_utils` alone."""

"""Run records: receipts, ranks, digests of rules, and what a chapter calls to start and to save a run."""

"""From receipts to verdicts: statistics, rules applied, the ledger and its tables."""

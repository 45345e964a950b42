"""Tasks: batches, targets and losses."""

"""Models without a run: opened, sampled from, read and written in other forms."""

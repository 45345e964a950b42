"""Checkpoints of a run: saved, found, verified and read."""

"""Checkpoints elsewhere: at addresses that fsspec knows, or in other folders."""

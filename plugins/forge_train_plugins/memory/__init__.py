"""Recomputation and compilation."""

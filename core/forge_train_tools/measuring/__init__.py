"""Measurements of a cluster: collectives, matrix products and memory, written as a file that `forge plan` reads."""

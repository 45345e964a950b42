"""Sounds among the tokens of a language model."""

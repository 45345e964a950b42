"""A model looked into while it reads a text."""

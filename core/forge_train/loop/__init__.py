"""A run: its steps, and what happens between them."""

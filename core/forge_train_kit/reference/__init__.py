"""A frozen reference that tasks compare the model with: its options, where it comes from, and its log-probabilities.

Importing `plugin` imports no torch; `scores` and `stored` do.
"""

"""Fusions: how a model takes in images and other items."""

"""Adapting models that are trained already."""

"""Plugins that keep a run alive."""

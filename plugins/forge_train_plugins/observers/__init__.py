"""Plugins that observe a run."""

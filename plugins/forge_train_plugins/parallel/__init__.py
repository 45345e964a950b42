"""Plugins that distribute a model over processes."""

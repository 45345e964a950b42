"""The plugin API, and the code that calls plugins."""

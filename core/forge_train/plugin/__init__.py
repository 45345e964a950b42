"""The plugin class, the hook specs, and the code that calls plugins."""

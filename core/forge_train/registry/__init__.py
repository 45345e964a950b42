"""Discovery and selection of plugins, and dispatch of hooks to them."""

"""The two faces of the `console` plugin, and what both know."""

"""An example of a package of plugins for forge."""

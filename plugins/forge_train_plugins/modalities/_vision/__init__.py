"""The code of the plugins in `vision`."""

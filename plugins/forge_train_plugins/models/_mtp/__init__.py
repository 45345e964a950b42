"""Parts of the `mtp` plugin."""

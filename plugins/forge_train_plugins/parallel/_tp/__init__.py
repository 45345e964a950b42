"""Parts of the `tp` plugin."""

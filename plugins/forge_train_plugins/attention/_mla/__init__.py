"""Parts of the `mla` plugin."""

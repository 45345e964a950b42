"""Parts of the `cross_attention` plugin."""

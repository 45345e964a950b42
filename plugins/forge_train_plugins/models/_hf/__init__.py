"""Parts of the `hf` plugin."""

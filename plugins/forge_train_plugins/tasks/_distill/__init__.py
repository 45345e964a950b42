"""Parts of the `distill` plugin."""

"""Parts of the `cp` plugin."""

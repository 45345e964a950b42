"""Parts of the `profile` plugin."""

"""Parts of the `pp` plugin."""

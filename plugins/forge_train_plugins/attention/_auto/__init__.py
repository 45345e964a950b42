"""Parts of the `auto` plugin."""

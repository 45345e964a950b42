"""Parts of the `decoder` plugin."""

"""Parts of the `moe` plugin."""

"""Parts of the `image_tiles` plugin."""

"""Parts of the plugin `hf_images`."""

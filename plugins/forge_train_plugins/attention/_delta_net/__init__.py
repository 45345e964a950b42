"""Parts of the `delta_net` plugin."""

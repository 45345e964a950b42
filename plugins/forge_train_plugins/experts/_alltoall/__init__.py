"""Parts of the `alltoall` plugin."""

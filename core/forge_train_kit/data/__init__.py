"""What data plugins are built from: files and their formats, token shards, packing, order, loaders. Needs no plugin."""

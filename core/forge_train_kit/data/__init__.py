"""Building blocks of data plugins: files and their formats, token shards, packing, order, loaders. Needs no plugin."""

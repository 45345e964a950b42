"""Search for a layout: every one that a configuration can have on so many ranks, ranked by closed forms."""

"""Parts of the `muon` plugin."""

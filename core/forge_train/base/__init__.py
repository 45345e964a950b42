"""Errors, files, names: what the other rooms stand on. It imports nothing else of forge."""

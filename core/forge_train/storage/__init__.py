"""Storage of runs: what they leave on disk, and how it is loaded."""

"""Models outside of runs: opens them, generates with them, and reads and writes them in other formats."""

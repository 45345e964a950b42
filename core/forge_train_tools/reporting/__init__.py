"""Runs as the page of `forge runs report` needs them: with metrics in curves of few points."""

"""A run from its first step to its last: start, resume, log, save."""

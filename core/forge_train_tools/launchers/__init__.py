"""Launchers: one description of a job, written as each cluster's own files, and the commands of its client."""

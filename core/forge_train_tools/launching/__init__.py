"""Local processes: started, watched, and told how they ended."""

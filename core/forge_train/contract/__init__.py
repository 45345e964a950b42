"""What plugins are written against, and how they are called."""

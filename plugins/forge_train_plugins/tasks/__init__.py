"""What is learned from a batch, and its loss."""

"""What a model learns from a batch, and the loss."""

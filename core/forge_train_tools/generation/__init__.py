"""Text that a trained model writes: one prompt as it is written, the records of a file, or a chat."""

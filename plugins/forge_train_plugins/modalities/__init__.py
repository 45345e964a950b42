"""Images and other items beside text."""

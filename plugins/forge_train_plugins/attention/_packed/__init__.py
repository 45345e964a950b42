"""Parts of the `varlen` and `flash` plugins."""

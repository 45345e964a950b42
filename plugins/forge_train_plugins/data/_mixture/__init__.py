"""Parts of the mixture: its recipe, and its metrics by source."""

"""Which plugins there are, which are enabled, and whom each hook calls."""

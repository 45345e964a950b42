"""From plugins' transforms to one model."""

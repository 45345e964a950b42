"""The values that core and plugins exchange."""

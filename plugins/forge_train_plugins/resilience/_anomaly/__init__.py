"""The parts of `anomaly`."""

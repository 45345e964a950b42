"""The parts of `watchdog`."""

"""Discovery and selection of plugins, and the setup of a run."""

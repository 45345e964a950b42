"""Configurations as users write them: presets, TOML files, `FORGE_SET` and `--set`, laid over each other."""

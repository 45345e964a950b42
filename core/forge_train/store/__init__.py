"""The format of a checkpoint: safetensors files with an index, written and read by ranges."""

"""The parts of the `tokenizer` plugin: bytes, a `tokenizer.json`, and the special tokens that a model's files name."""

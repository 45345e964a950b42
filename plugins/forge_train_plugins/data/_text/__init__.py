"""The parts of the `text` plugin: files, documents, tokens, their cache, the loader and the n-gram baseline."""

"""A prompt from the held-out text."""

from __future__ import annotations

from forge_train_kit.tokenizer import Tokenizer

from .corpus import Split

_WORDS, _LONGEST = 3, 40
"""Words of a prompt and of the shortest line to take one from; the most characters."""
_DOCUMENTS, _TOKENS = 20, 512
"""Number of documents to look at, and tokens of each."""


def opening(part: Split, tokenizer: Tokenizer) -> str:
    """The first words of a line, which leave it at least one to be written; empty where there is no such line."""
    starts = [0, *part.ends[: _DOCUMENTS - 1].tolist()]
    for start, end in zip(starts, part.ends.tolist(), strict=False):
        lines = tokenizer.decode(part.tokens[start : min(end, start + _TOKENS)].tolist()).splitlines()
        for line in [*lines[1:], *lines[:1]]:  # the first may begin in the middle of a word
            words = line.split()
            prompt = " ".join(words[: min(_WORDS, len(words) - 1)])
            plain = line.isprintable() and "\ufffd" not in prompt and line.strip().startswith(prompt)
            if plain and len(words) >= _WORDS and len(prompt) <= _LONGEST:
                return prompt
    return ""

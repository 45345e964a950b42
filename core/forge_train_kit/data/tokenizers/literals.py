"""A tokenizer that tells special tokens from text that looks like them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_train import ConfigError
from forge_train.base.errors import describe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters, which texts should not hold."""


class Literals:
    """The same tokenizer with other names of its special tokens. A text whose special tokens have these names is
    encoded in one piece, so that all else is as it always is. The names hold a random number, so that no text can
    forge one.

    Args:
        tokenizer: of the `tokenizers` library.

    Raises:
        ConfigError: it does not take the names.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        import tokenizers

        table: dict[str, Any] = json.loads(tokenizer.to_str())
        secret = f"{secrets.randbits(64):020}"
        names = {
            one["content"]: f"{_OPEN}{secret}{one['id']}{_CLOSE}" for one in table["added_tokens"] if one["special"]
        }
        for one in table["added_tokens"]:
            one["content"] = names.get(one["content"], one["content"])
        model = table["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(token, token): id for token, id in vocabulary.items()}
        elif isinstance(vocabulary, list):
            model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(table))
        except Exception as error:  # the library raises bare Exception for whatever is wrong
            raise ConfigError(f"The tokenizer can't leave special tokens as text: {describe(error)}") from error
        self._names = names
        wrong = [
            token for token, name in names.items() if self._tokenizer.token_to_id(name) != tokenizer.token_to_id(token)
        ]
        if wrong:
            raise ConfigError(f"The tokenizer can't leave special tokens as text: {wrong[0]!r} gets another id.")
        self._pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")

    def encode(self, text: str, literal: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and the characters of each; special tokens that begin in the spans `literal` are text."""
        starts = {start for start, _ in literal}
        pieces, places, last = [], [], 0
        for match in self._pattern.finditer(text):
            if match.start() in starts:
                continue
            name = self._names[match.group()]
            pieces += [text[last : match.start()], name]
            places += [np.arange(last, match.start()), np.full(len(name), match.start())]
            last = match.end()
        encoding = self._tokenizer.encode("".join([*pieces, text[last:]]), add_special_tokens=False)
        place = np.concatenate([*places, np.arange(last, len(text) + 1)])
        return encoding.ids, [(int(place[start]), int(place[stop])) for start, stop in encoding.offsets]

"""Which special tokens the files beside a `tokenizer.json` name, as they lie in a model's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forge_train import ConfigError
from forge_train.ground.errors import describe

TOKENIZER_CONFIG, TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
MODEL_CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"


def added_tokens(folder: Path) -> list[tuple[int, str, bool]]:
    """Id, content and whether it is special, of the tokens that `tokenizer_config.json` lists."""
    listed = _table(folder / TOKENIZER_CONFIG).get("added_tokens_decoder") or {}
    return sorted((int(id), entry["content"], bool(entry.get("special"))) for id, entry in listed.items())


def adds_begin(folder: Path) -> bool:
    """Whether `tokenizer_config.json` leaves a begin before a text; for tokenizers without a `tokenizer.json`."""
    return _table(folder / TOKENIZER_CONFIG).get("add_bos_token") is not False


def ends(folder: Path, id_of: Callable[[str], int | None]) -> tuple[int | None, tuple[int, ...]]:
    """The id after a document, None where no file says it, and the ids that end a generated text.

    `tokenizer_config.json` (or `special_tokens_map.json`) names the end of a document; where neither does, the first
    `eos_token_id` of `config.json` or `generation_config.json` is it. A text ends with each `eos_token_id` of
    `generation_config.json`, or of `config.json` where that has none.

    Args:
        folder: of the `tokenizer.json`.
        id_of: the id of a token, None for an unknown one.

    Raises:
        ConfigError: a file can't be read, or names a token that the tokenizer does not have.
    """
    model, generation = (_ids(folder / name) for name in (MODEL_CONFIG, GENERATION_CONFIG))
    end = next(iter(model or generation), None)
    for name in (TOKENIZER_CONFIG, TOKENS_MAP):
        value = _table(folder / name).get("eos_token")
        if content := value.get("content") if isinstance(value, Mapping) else value:
            if (end := id_of(content)) is None:
                raise ConfigError(f"{folder / name}: eos_token {content!r} is not in the tokenizer.")
            break
    return end, generation or model


def _ids(file: Path) -> tuple[int, ...]:
    """`eos_token_id` of a file, which may be one id or several."""
    value = _table(file).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise ConfigError(f"{file}: eos_token_id: expected an id, or a list of ids, found {value!r}.")
    return tuple(ids)


def _table(file: Path) -> dict[str, Any]:
    """A JSON file's object; empty if there is no such file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: can't be read: {describe(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(found).__name__}.")
    return found

"""Special and added tokens that the files of a model's folder name."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train.base.errors import describe

from ...lfs import check_pointer

if TYPE_CHECKING:
    from tokenizers import AddedToken

TOKENIZER_CONFIG, TOKENS_MAP, ADDED_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
MODEL_CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
FORMER_STOPS = "_forge_former_stops"
"""Key of the stops in `generation_config.json` before training on conversations added one."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _FORMER = "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def added_tokens(folder: Path) -> list[tuple[int | None, AddedToken, Path]]:
    """Tokens that the files beside a tokenizer add to it or change, in the order in which transformers adds them: each
    with its id, if a file says it, and that file.

    `added_tokens_decoder` in `tokenizer_config.json` replaces `special_tokens_map.json` and `added_tokens.json`, as in
    transformers.

    Raises:
        ConfigError: a file can't be read, or an entry is no token.
    """
    file = folder / TOKENIZER_CONFIG
    values = table(file)
    listed: dict[int, tuple[AddedToken, Path]] = {}
    entries = values.get("added_tokens_decoder")
    if entries is None:
        values = _merged(values, table(folder / TOKENS_MAP))
    elif not isinstance(entries, Mapping):
        raise ConfigError(f"{file}: added_tokens_decoder: expected an object, found {entries!r}.")
    named = [(key, _token(folder, key, value)) for key, value in _named(values)]
    extra = values.get(_EXTRA) or values.get(_FORMER) or []
    extras = [_token(folder, _EXTRA, one) for one in (extra if isinstance(extra, list) else [])]
    special = {token.content for token in (*(token for _, token in named), *extras)}
    if entries is not None:
        for id, entry in entries.items():
            listed[_id(file, id)] = _token(folder, "added_tokens_decoder", entry, special=False), file
    else:
        import tokenizers

        file = folder / ADDED_TOKENS
        for content, id in table(file).items():
            known = content in special
            listed[_id(file, id)] = tokenizers.AddedToken(content, normalized=not known, special=known), file
    contents = {token.content for token, _ in listed.values()}
    found: list[tuple[int | None, AddedToken, Path]] = []
    for id, (token, where) in sorted(listed.items()):
        token.special = token.special or token.content in {one.content for _, one in named}
        found.append((id, token, where))
    return [*found, *((None, one, folder) for one in (*(t for _, t in named), *extras) if one.content not in contents)]


def splits(folder: Path) -> bool:
    """Return True if special tokens in a text are encoded like other text (`split_special_tokens`)."""
    return table(folder / TOKENIZER_CONFIG).get("split_special_tokens") is True


def adds_begin(folder: Path) -> bool:
    """Return True if `tokenizer_config.json` adds a begin to a text; for tokenizers without a `tokenizer.json`."""
    return table(folder / TOKENIZER_CONFIG).get("add_bos_token") is not False


def ends(folder: Path, id_of: Callable[[str], int | None], vocabulary: int) -> tuple[int | None, tuple[int, ...]]:
    """The id after a document, None where no file says it, and the ids that end a generated text.

    `tokenizer_config.json` (or `special_tokens_map.json`) names the end of a document; where neither does, the first
    `eos_token_id` of `config.json` or `generation_config.json` that the tokenizer has is it. A text ends with each
    `eos_token_id` of `generation_config.json`, or of `config.json` where that has none.

    Args:
        folder: of the `tokenizer.json`.
        id_of: the id of a token, None for an unknown one.
        vocabulary: ids of the tokenizer are below it; those of a model may go beyond.

    Raises:
        ConfigError: a file can't be read, or names a token that the tokenizer does not have.
    """
    model, generation = stop_ids(folder)
    end = next((id for id in (model or generation) if id < vocabulary), None)
    file, named = _end(folder)
    if named and (end := id_of(named)) is None:
        raise ConfigError(f"{file}: eos_token {named!r} is not in the tokenizer.")
    return end, generation or model


def check_end(folder: Path, known: Collection[str]) -> None:
    """Refuse an `eos_token` that is not among the known tokens; transformers would add it, untrained."""
    file, named = _end(folder)
    if named and named not in known:
        raise ConfigError(f"{file}: eos_token {named!r} is not in the tokenizer.")


def _end(folder: Path) -> tuple[Path, str]:
    """The file that names the end of a document, and the name; empty if none does."""
    for name in (TOKENIZER_CONFIG, TOKENS_MAP):
        value = table(folder / name).get("eos_token")
        if content := value.get("content") if isinstance(value, Mapping) else value:
            return folder / name, str(content)
    return folder, ""


def deciding(folder: Path) -> tuple[object, ...]:
    """Values of `config.json` and `generation_config.json` that decide tokens: the model's type, which may choose the
    tokenizer's class, and the stops, as they were before a run added one to its copy."""
    model, generation = stop_ids(folder)
    former = table(folder / GENERATION_CONFIG).get(FORMER_STOPS, generation)
    return table(folder / MODEL_CONFIG).get("model_type"), list(model), list(former)


def stop_ids(folder: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`eos_token_id` of `config.json` and of `generation_config.json`."""
    return _ids(folder / MODEL_CONFIG), _ids(folder / GENERATION_CONFIG)


def table(file: Path) -> dict[str, Any]:
    """A JSON file's object; empty if there is no such file."""
    check_pointer(file)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: can't be read: {describe(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(found).__name__}.")
    return found


def _merged(config: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `tokenizer_config.json` with those of `special_tokens_map.json`, which precede them."""
    values = {**config}
    if values.get(_FORMER) and not values.get(_EXTRA):
        values[_EXTRA] = values.pop(_FORMER)
    for key, value in beside.items():
        mine = values.get(key)
        if key == _EXTRA and isinstance(value, list) and isinstance(mine, list):
            value = [*mine, *(one for one in value if one not in mine)]
        values[key] = value
    return values


def _named(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys that name one special token each, and their values: transformers' own, then a model's."""
    for key in NAMED:
        if values.get(key) is not None:
            yield key, values[key]
    own = values.get(_EXTRA)
    for key, value in (*values.items(), *(own.items() if isinstance(own, Mapping) else ())):
        if key.endswith("_token") and key not in NAMED and isinstance(value, str | Mapping):
            yield key, value


def _token(folder: Path, key: str, value: Any, *, special: bool = True) -> AddedToken:
    """A token that is written as a text, or as an object with its flags."""
    import tokenizers

    content = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(content, str):
        raise ConfigError(f"{folder / TOKENIZER_CONFIG}: {key}: expected a token, found {value!r}.")
    given = {name: bool(value[name]) for name in _FLAGS if name in value} if isinstance(value, Mapping) else {}
    return tokenizers.AddedToken(content, **{**given, "special": special or given.get("special", False)})


def _id(file: Path, id: Any) -> int:
    try:
        return int(id)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file}: expected the id of a token, found {id!r}.") from error


def _ids(file: Path) -> tuple[int, ...]:
    """`eos_token_id` of a file, which may be one id or several."""
    value = table(file).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise ConfigError(f"{file}: eos_token_id: expected an id, or a list of ids, found {value!r}.")
    return tuple(ids)

"""Tokens that are added to the files of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from forge_train import ConfigError
from forge_train.base.files import write_json, write_whole

from ... import model_files
from . import special
from .pretrained import FILE, PretrainedTokenizer

MARK = "_forge_added"
"""Key in `tokenizer_config.json` of the tokens that were added here. transformers ignores it."""


def add_tokens(source: Path, target: Path, tokens: Sequence[str], special_tokens: Sequence[str]) -> int:
    """Write the files of a tokenizer into a folder, with tokens added at the end of its ids.

    Args:
        source: a folder with a `tokenizer.json`, or such a file.
        target: the new folder.
        tokens: text that becomes one token each.
        special_tokens: the same, left out of decoded text.

    Returns:
        The number of ids before.

    Raises:
        ConfigError: for a tokenizer without a `tokenizer.json`, and for a token that it has already.
    """
    from tokenizers import AddedToken, Tokenizer

    found = model_files.files(source)
    if FILE not in found:
        raise ConfigError(
            f"tokenizer.add: tokens can be added to a {FILE}, and {source} has none. With transformers, "
            f"AutoTokenizer.from_pretrained({str(source)!r}).save_pretrained(NEW) writes one."
        )
    before = PretrainedTokenizer(source).vocabulary
    model_files.copy(found, target)
    tokenizer = Tokenizer.from_file(str(target / FILE))
    for text in (*tokens, *special_tokens):
        if (known := tokenizer.token_to_id(text)) is not None:
            raise ConfigError(f"tokenizer.add: {text!r} is token {known} of {source} already.")
    added = [AddedToken(text, normalized=False, special=False) for text in tokens]
    added += [AddedToken(text, normalized=False, special=True) for text in special_tokens]
    if tokenizer.get_vocab_size() != before:
        listed = {id: token for id, token, _ in special.added_tokens(source) if id is not None}
        tokenizer.add_tokens([token for _, token in sorted(listed.items())])
    for token in added:
        tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
    ids = [tokenizer.token_to_id(token.content) for token in added]
    if ids != [*range(before, before + len(added))]:
        raise ConfigError(
            f"tokenizer.add: {source} would give its new tokens the ids {ids}, not those from {before} on."
        )
    write_whole(target / FILE, tokenizer.to_str(pretty=True))
    config = special.table(target / special.TOKENIZER_CONFIG)
    values: dict[str, Any] = {**config, MARK: [*config.get(MARK, ()), *(token.content for token in added)]}
    if (entries := values.get("added_tokens_decoder")) is not None:
        more = {str(id): _entry(token) for id, token in zip(ids, added, strict=True)}
        values["added_tokens_decoder"] = {**entries, **more}
    write_json(target / special.TOKENIZER_CONFIG, values)
    if (target / special.ADDED_TOKENS).is_file():
        known_ids = special.table(target / special.ADDED_TOKENS)
        write_json(
            target / special.ADDED_TOKENS, {**known_ids, **dict(zip((t.content for t in added), ids, strict=True))}
        )
    return before


def _entry(token: Any) -> dict[str, Any]:
    keys = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
    return {key: getattr(token, key) for key in keys}


def added_tokens(path: Path) -> dict[str, int]:
    """The tokens that were added to a tokenizer's files here, and their ids."""
    folder = path if path.is_dir() else path.parent
    marked = special.table(folder / special.TOKENIZER_CONFIG).get(MARK, [])
    known = json.loads((folder / FILE).read_text(encoding="utf-8"))["added_tokens"] if marked else []
    return {one["content"]: int(one["id"]) for one in known if one["content"] in marked}


def check_added(path: Path, tokens: Collection[str]) -> None:
    """Check that tokens were added to a tokenizer's files.

    Raises:
        ConfigError: for one that was not.
    """
    ids = added_tokens(path)
    if lost := [token for token in tokens if token not in ids]:
        raise ConfigError(
            f"tokenizer.add: {lost[0]!r} was not added to {path}. Tokens are added where a run starts from a folder in "
            "Hugging Face layout (forge train FOLDER, or --from FOLDER), or from a tokenizer.json without a model.",
            key="tokenizer.add",
        )

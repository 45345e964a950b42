"""Sources of chat templates: a Hugging Face folder, a file, or one of those defined here."""

from __future__ import annotations

import datetime
import json
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from forge_train import ConfigError
from forge_train.base.errors import describe, nearest
from forge_train.config import Config

from ...lfs import check_pointer
from .template import Template

_CHATML = """\
{{- bos_token if bos_token != '<|im_start|>' }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

_PLAIN = """\
{{- bos_token }}
{%- for message in messages %}
    {{- message.role | capitalize + ': ' + message.content }}
    {%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
    {{- '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}"""

BUILT_IN: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "chatml": (_CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama3": (_LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "plain": (_PLAIN, ()),
}
"""Jinja, and the tokens that it writes, by name. They take text alone, no tools. `plain` needs no token: a turn ends
with the tokenizer's `eos_token`, or with an empty line where it has none, as bytes."""

_TEXT_ONLY = """\
{%- if tools or messages | selectattr('tool_calls', 'defined') | list %}
    {{- raise_exception('this template writes no tools; take the one that a model with tools came with') }}
{%- endif %}
"""
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that transformers gives to a template."""


_KEY = "template"
"""Option of plugins that choose a template."""


class NoTemplateError(ConfigError):
    """A tokenizer has no chat template of its own, and none was chosen."""


def advice(config: Config) -> str:
    """A clause that says which template to choose for a model whose tokenizer has none: the one that it was trained
    with, if its configuration names one.

    Args:
        config: that the model was trained with.
    """
    for key, value in config.values().items():
        if key.endswith(f".{_KEY}") and isinstance(value, str) and (value in BUILT_IN or Path(value).is_file()):
            return f"it was trained with {key} = {value!r}, so add --template {shlex.quote(value)}"
    return "choose one with --template"


def open_template(
    choice: str = "",
    folder: Path | None = None,
    *,
    variables: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    now: datetime.datetime | None = None,
) -> Template:
    """A template, with the special tokens of a tokenizer's folder.

    Args:
        choice: `chatml`, `llama3`, `plain`, the name of one of several in the folder, or a file. The empty string is
            the folder's: `chat_template.jinja`, or else `chat_template` in `tokenizer_config.json`.
        folder: of the `tokenizer.json`; None for a tokenizer without, as bytes.
        variables: for the template, beside the special tokens: `{"date_string": "26 Jul 2024"}`.
        options: of the template: `{"enable_thinking": False}`.
        now: see `Template`.

    Raises:
        NoTemplateError: none was chosen, and the folder has none.
        ConfigError: there is no such template, or it reads no such option; a built-in one writes tokens that the
            tokenizer lacks; a file can't be read.
    """
    config = _table(folder / "tokenizer_config.json") if folder else {}
    own = _own(folder, config) if folder else {}
    special, tokens = _special(folder, config) if folder else ({}, ())
    made = partial(Template, variables={**special, **(variables or {})}, options=options, tokens=tokens, now=now)
    if not choice and own:
        return made(own, name=f"{folder}: chat template")
    if choice in own:
        return made(own[choice], name=f"{folder}: chat template {choice!r}")
    if choice in BUILT_IN:
        source, needs = BUILT_IN[choice]
        if lacking := [token for token in needs if token not in tokens]:
            raise ConfigError(
                f"the chat template {choice!r} writes {', '.join(lacking)}, which are no tokens of this tokenizer: "
                "a model could not end its turns. 'plain' needs no tokens of its own."
            )
        return made(_TEXT_ONLY + source, name=f"the chat template {choice!r}")
    if choice and Path(choice).is_file():
        return made(_read(Path(choice)), name=choice)
    names = [*own, *BUILT_IN]
    if choice:
        raise ConfigError(
            f"no chat template {choice!r}: expected {', '.join(map(repr, names))} or a file.{nearest(choice, names)}"
        )
    raise NoTemplateError(
        f"{folder or 'this tokenizer'} has no chat template (chat_template.jinja, or chat_template in "
        f"tokenizer_config.json): choose {', '.join(map(repr, BUILT_IN))} or a file."
    )


def _own(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The folder's templates by name. Its files go before `tokenizer_config.json`, as in transformers."""
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (file := folder / "chat_template.jinja").is_file():
        files["default"] = file
    if files:
        return {name: _read(file) for name, file in files.items()}
    found = config.get("chat_template") or {}
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list) and all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in found):
        found = {one["name"]: one["template"] for one in found}
    if not isinstance(found, dict) or not all(isinstance(source, str) for source in found.values()):
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}: chat_template: expected a template, or a list of named."
        )
    return found


def _special(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The special tokens by transformers' names, and all added tokens."""
    named = {}
    for table in (_table(folder / "special_tokens_map.json"), config):
        for name in _NAMED:
            value = table.get(name)
            if isinstance(content := value.get("content") if isinstance(value, dict) else value, str):
                named[name] = content
    added = [entry.get("content") for entry in _table(folder / "tokenizer.json").get("added_tokens") or []]
    listed = [entry.get("content") for entry in (config.get("added_tokens_decoder") or {}).values()]
    return named, tuple(token for token in [*added, *listed, *named.values()] if isinstance(token, str))


def _table(file: Path) -> dict[str, Any]:
    """A JSON file's object; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(_read(file))
    except ValueError as error:
        raise ConfigError(f"{file}: no JSON: {describe(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(found).__name__}.")
    return found


def _read(file: Path) -> str:
    check_pointer(file)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: can't be read: {describe(error)}") from error

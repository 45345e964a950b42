"""The files beside a tokenizer, so that whoever loads them chats as the model was trained to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_train import ConfigError
from forge_train.base.files import write_json, write_whole
from forge_train.run.run import writing
from forge_train_kit import hookspecs, model_files
from forge_train_kit.tokenizer import Tokenizer

from ..tokenizers.special import FORMER_STOPS, GENERATION_CONFIG, MODEL_CONFIG, stop_ids
from .records import Conversation
from .render import render, tokenise
from .sources import open_template
from .template import Template

if TYPE_CHECKING:
    from forge_train import Job

_MARKUP = re.compile(r"<\S+>|\[\S+\]")
"""Form of tokens in templates: `<|im_end|>`, `</s>`, `[EOS]`."""
_PROBE = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"})


def turn_end(template: Template, tokenizer: Tokenizer) -> int | None:
    """The token that ends a turn of the assistant; None where the template ends it with plain text.

    Raises:
        ConfigError: the template refuses a question with an answer, or ends a turn with what looks like a token and is
            none of this tokenizer's.
    """
    segments = render(template, Conversation(_PROBE, where="a question with an answer"))
    ids, trained = tokenise(tokenizer, segments)
    if segments.learned and trained.any():
        start, stop = segments.learned[-1]
        if segments.text[start:stop].endswith(template.tokens):
            return int(ids[np.flatnonzero(trained)[-1]])
    after = segments.text.rpartition(_PROBE[-1]["content"])[2].strip()
    if _MARKUP.match(after) and not after.startswith(template.tokens):
        raise ConfigError(
            f"{template.name} ends a turn with {after.split()[0]!r}, which is no token of this tokenizer: generation "
            "would not stop there. Take another template, or the tokenizer that it was written for."
        )
    return None


def save_question(job: Job, author: object) -> None:
    """Store a message to try the trained model with, if `forge generate --chat` finds the run's template."""
    if job.dist.main and (job.run.dir / model_files.FOLDER / model_files.TOKENIZER).is_file():
        file = job.run.artifact("message.txt")
        file.write_text("Who are you?", encoding="utf-8")
        job.record(file, author)


def save_template(job: Job, choice: str, options: Mapping[str, Any]) -> None:
    """Complete the tokenizer's files in the run's folder, if there are any; see `write_beside`.

    Args:
        job: the run.
        choice: the template of the configuration; empty for the tokenizer's own.
        options: of the template.
    """
    folder = job.run.dir / model_files.FOLDER
    found = model_files.files(folder)  # a SentencePiece model may lie there alone
    if job.dist.main and (model_files.TOKENIZER in found or len(found) > 1):
        with writing(job.run.dir):
            template = open_template(choice, folder, options=options)
            write_beside(folder, template, hookspecs.tokenizer(job), chosen=bool(choice or options))


def write_beside(folder: Path, template: Template, tokenizer: Tokenizer, *, chosen: bool) -> None:
    """Have generation end where a turn ends, and the folder's template be the one that was trained with.

    Args:
        folder: of a `tokenizer.json`; its `generation_config.json` gets the token that ends a turn beside those that
            it has, and is made if there is none.
        template: that was trained with.
        tokenizer: of that folder.
        chosen: whether it is another template than the folder's own, and is written there.

    Raises:
        ConfigError: see `turn_end`.
        OSError: a file can't be written.
    """
    if chosen:
        write_whole(folder / "chat_template.jinja", template.sources["default"])
    end = turn_end(template, tokenizer)
    if end is None or end in tokenizer.stops:
        return
    known = _table(folder / GENERATION_CONFIG)
    if not known:
        model = _table(folder / MODEL_CONFIG)
        known = {key: model[key] for key in ("bos_token_id", "pad_token_id") if model.get(key) is not None}
    known.pop("_from_model_config", None)  # else transformers takes the ids of config.json
    former = {FORMER_STOPS: known.get(FORMER_STOPS, list(stop_ids(folder)[1]))}
    write_json(folder / GENERATION_CONFIG, {**known, "eos_token_id": [*tokenizer.stops, end], **former})


def _table(file: Path) -> dict[str, object]:
    """A JSON object; the tokenizer, which was opened before, has refused anything else."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

"""Pairs: two answers to one prompt, the better and the worse; and texts that belong together or apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge_train import ConfigError

from .calls import listed, tools_of
from .flags import check_whole
from .records import Conversation, Message, check_beside, checked, common, said, with_system
from .render import Segments, render
from .spelling import check_spelling
from .template import Template


@dataclass(frozen=True, slots=True)
class Preference:
    """Two conversations that begin with the same messages, their context."""

    chosen: Conversation
    rejected: Conversation


@dataclass(frozen=True, slots=True)
class EmbeddingTexts:
    """Texts for a contrastive loss: `positive` belongs to `anchor`, the `negatives` do not."""

    anchor: str
    positive: str
    negatives: tuple[str, ...] = ()


def preference(record: Mapping[str, Any], where: str = "this record") -> Preference:
    """`{"prompt"?, "chosen", "rejected", "system"?, "tools"?}`, each a string or a list of messages.

    Without `prompt` the answers are lists, or transcripts as in HH-RLHF, and the messages with which both begin are the
    prompt.

    Raises:
        ConfigError: a field is missing or of another shape; the answers are the same, or have no turn of the assistant;
            a field beside them means something and is not read.
    """
    fields = {name: value for name, value in record.items() if value is not None and (name, value) != ("prompt", "")}
    if "chosen" not in fields and {"completion", "label"} <= fields.keys():
        raise ConfigError(
            f"{where}: prompt, completion and label are one answer with a verdict, and a pair needs two: join a "
            "true and a false answer to the same prompt into a record of prompt, chosen and rejected."
        )
    if null := [name for name in ("chosen", "rejected") if name in record and name not in fields]:
        raise ConfigError(f"{where}: {null[0]} is null; a pair needs both answers.")
    check_spelling(fields, ("chosen", "rejected"), where)
    if not {"chosen", "rejected"} <= fields.keys():
        raise ConfigError(f"{where}: expected chosen and rejected; the fields are {', '.join(fields) or 'none'}.")
    check_beside(fields, where)
    check_spelling(fields, ("prompt",), where)
    prompt = said(fields["prompt"], "user", f"{where}: prompt") if "prompt" in fields else []
    answers = []
    for name in ("chosen", "rejected"):
        if not prompt and isinstance(fields[name], str) and (turns := _transcript(fields[name])):
            answers.append(turns)
            continue
        if isinstance(fields[name], str) and not prompt and record.get("prompt") != "":
            raise ConfigError(f"{where}: {name} is a string, and there is no prompt; give one, or lists of messages.")
        answer = said(fields[name], "assistant", f"{where}: {name}")
        repeats = prompt and answer[: len(prompt)] == prompt
        answers.append(answer if repeats else [*prompt, *answer])
    chosen, rejected = answers = [with_system(fields, answer, where) for answer in answers]
    if chosen == rejected:
        raise ConfigError(f"{where}: chosen and rejected are the same.")
    if any(message.get("weight", 1) not in (0, 1) for message in (*chosen, *rejected)):
        raise ConfigError(f"{where}: a message of a pair has a weight of 0 or 1: answers are compared as a whole.")
    context, tools = common(chosen, rejected), tools_of(fields.get("tools"), where)
    return Preference(*(checked(Conversation(tuple(answer), tools, context, where)) for answer in answers))


def _transcript(text: str) -> list[Message]:
    """The messages of HH-RLHF's strings, `\\n\\nHuman: … \\n\\nAssistant: …`; none of any other text."""
    before, *parts = re.split(r"(?:\A\s*|\n\n)(Human|Assistant):", text)
    if before.strip() or not parts or parts[0] != "Human":
        return []
    speakers = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": speakers[who], "content": words.strip()} for who, words in zip(parts[::2], parts[1::2], strict=True)
    ]


def render_preference(template: Template, pair: Preference) -> tuple[Segments, Segments]:
    """Both renderings; of each, what follows the common prompt is learned.

    Raises:
        ConfigError: as `render`; or nothing of an answer counts; or the template writes the prompt differently before
            the two answers.
    """
    chosen, rejected = render(template, pair.chosen), render(template, pair.rejected)
    for name, segments in (("chosen", chosen), ("rejected", rejected)):
        if not segments.learned:
            raise ConfigError(f"{pair.chosen.where}: {name} has no text that counts.")
    heads = [segments.text[: segments.learned[0][0]] for segments in (chosen, rejected)]
    if heads[0] != heads[1]:
        raise ConfigError(f"{pair.chosen.where}: {template.name} does not write the same prompt before both answers.")
    return chosen, rejected


def embedding_texts(record: Mapping[str, Any], where: str = "this record") -> EmbeddingTexts:
    """`{"anchor", "positive", "negative"?}`; `negative` is a string or a list of them.

    Raises:
        ConfigError: a field is missing or no text.
    """
    there = ", ".join(record) or "none"
    for name in ("anchor", "positive"):
        if not isinstance(record.get(name), str):
            raise ConfigError(f"{where}: expected a text as {name}; the fields are {there}.")
    check_whole(record, where)
    check_spelling(record, ("negative",), where)
    negative = listed(record.get("negative") or [], f"{where}: negative")  # CSV has no null, and no lists
    negatives = [negative] if isinstance(negative, str) else negative
    if not isinstance(negatives, list) or not all(isinstance(text, str) for text in negatives):
        raise ConfigError(f"{where}: negative: expected a text, or a list of texts.")
    return EmbeddingTexts(record["anchor"], record["positive"], tuple(negatives))

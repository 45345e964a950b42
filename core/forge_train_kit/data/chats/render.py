"""A conversation as text, which of its characters are learned, and both as tokens."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forge_train import ConfigError
from forge_train.contract.protocols import Tokenizer
from forge_train_kit.data.encoders import OffsetEncoder

from ..shard import Learned
from .literal import LiteralEncoder
from .records import Conversation
from .template import Span, Template
from .turns import Turns

Learn = Literal["assistant", "last", "all"]
"""Tokens that are learned: all turns of the assistant, the last of them, or every token."""


@dataclass(frozen=True, slots=True)
class Segments:
    """A rendered conversation.

    Args:
        text: as the template wrote it, special tokens included.
        learned: start and end (exclusive) of what is learned, in characters, in order and apart.
        weights: how much each of these counts; empty if each counts 1.
        literal: start and end of special tokens that are text.
    """

    text: str
    learned: tuple[Span, ...]
    weights: tuple[float, ...] = ()
    literal: tuple[Span, ...] = ()


def render(template: Template, conversation: Conversation, *, learn: Learn = "assistant") -> Segments:
    """The text of a conversation, and what of it is learned: the assistant's words and the token that ends its turn.

    Headers are not learned, nor is what a template writes after the end of a turn, such as the line break of ChatML.
    A message's `weight` is that of its tokens. What a template rewrites is learned as it stands in this text. A
    template's `{% generation %}` tags decide where they are; without them the turns are found as the module `turns`
    describes. Messages of the conversation's context, and those with a `weight` of 0, are not learned, unless all is.

    Raises:
        ConfigError: naming the record: the template fails on it, nothing is learned of it, or the turns can't be told
            from the rest.
    """
    try:
        text, tagged = template.render(conversation.messages, conversation.tools)
        turns = [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        wanted = conversation.learned[-1:] if learn == "last" else conversation.learned
        if learn == "all":
            return Segments(text, ((0, len(text)),))
        if not wanted:
            raise ConfigError("every turn of the assistant has a weight of 0, so that nothing is learned.")
        weights = {at: conversation.weight(at) for at in wanted}
        if tagged is not None and wanted == turns and {*weights.values()} == {1}:
            return Segments(text, tuple(tagged))
        if tagged is not None and len(tagged) == len(turns):
            found = zip(turns, tagged, strict=True)
            return _segments(text, [(span, weights[at]) for at, span in found if at in wanted])
        finder = Turns(template, conversation.messages, conversation.tools, text)
        spans = [(span, weights[at]) for at in wanted for span in finder.spans(at)]
    except ConfigError as error:
        raise ConfigError(f"{conversation.where}: {error}") from error
    if tagged is not None:
        overlapping = (
            (one, next((weight for (start, stop), weight in spans if one[0] < stop and start < one[1]), 0.0))
            for one in tagged
        )
        spans = [(one, weight) for one, weight in overlapping if weight]
    return _segments(text, spans)


def _segments(text: str, spans: Iterable[tuple[Span, float]]) -> Segments:
    kept = [(span, weight) for span, weight in spans if span[0] < span[1]]
    weights = tuple(weight for _, weight in kept)
    return Segments(text, tuple(span for span, _ in kept), () if {*weights} <= {1} else weights)


def tokenise(tokenizer: Tokenizer, segments: Segments) -> tuple[NDArray[np.uint32], Learned]:
    """Token ids `[tokens]` of a rendering, and 1 `[tokens]` for each that is learned, or its weight (float32) where the
    rendering has weights.

    The text is encoded in one piece, as at inference: the ids are those of transformers' `apply_chat_template`. Nothing
    is put before it or after it: a template writes the beginning itself. As in transformers, a special token in the
    content of a message is encoded as that token.

    A token is learned if its first character is. One that begins before a learned span is not, although its end may lie
    inside: the model is given it, or a part of it, by the prompt.

    Raises:
        ConfigError: the tokenizer does not tell where its tokens lie.
    """
    ids, _, learned = _encoded(tokenizer, segments)
    return ids, learned


def tokenise_ended(
    tokenizer: Tokenizer, template: Template, segments: Segments, ends: Container[int]
) -> tuple[NDArray[np.uint32], Learned]:
    """The same, with an end to every learned turn and to the text.

    Some templates end a turn with the token that begins the next one (GLM's `<|user|>`): if generation stops there, it
    is learned. Where the text does not end with a token that ends texts, the tokenizer's own follows, and is learned if
    what stands before it is.

    Args:
        tokenizer: of the text.
        template: which rendered it.
        segments: the rendering.
        ends: the ids at which generation stops.
    """
    ids, starts, learned = _encoded(tokenizer, segments)
    for _, stop in segments.learned:
        at = int(starts.searchsorted(stop))
        if at < len(ids) and ids[at] in ends and not segments.text[:stop].endswith(template.tokens):
            before = learned[at - 1] if at > 0 and ids[at - 1] not in ends else 0
            learned[at] = max(learned[at], before)
    last = int(starts.searchsorted(len(segments.text.rstrip()))) - 1
    if tokenizer.end is not None and (last < 0 or ids[last] not in ends):
        ids, learned = np.append(ids, np.uint32(tokenizer.end)), np.append(learned, learned[-1:])
    return ids, learned


def _encoded(tokenizer: Tokenizer, segments: Segments) -> tuple[NDArray[np.uint32], NDArray[np.int64], Learned]:
    """Ids, the character that each begins with, and 1 for each that is learned."""
    if not isinstance(tokenizer, OffsetEncoder):
        raise ConfigError(
            f"{type(tokenizer).__name__} does not tell which characters a token stands for (encode_with_offsets), "
            "which masks of chats need."
        )
    if not segments.literal:
        ids, offsets = tokenizer.encode_with_offsets(segments.text)
    elif isinstance(tokenizer, LiteralEncoder):
        ids, offsets = tokenizer.encode_with_literals(segments.text, segments.literal)
    else:
        raise ConfigError(f"{type(tokenizer).__name__} can't leave special tokens as text (split_special_tokens).")
    weights = segments.weights or (1,) * len(segments.learned)
    learned: Learned = np.zeros(len(segments.text) + 1, np.float32 if segments.weights else np.uint8)
    for (start, stop), weight in zip(segments.learned, weights, strict=True):
        learned[start:stop] = weight
    starts = np.fromiter((start for start, _ in offsets), np.int64, len(ids))
    return np.asarray(ids, np.uint32), starts, learned[starts]

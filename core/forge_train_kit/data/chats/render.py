"""A conversation as text, which of its characters are learned, and both as tokens."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forge_train import ConfigError
from forge_train_kit.tokenizer import Tokenizer

from ..encoders import OffsetEncoder
from ..shard import Learned
from .literal import LiteralEncoder
from .records import Conversation
from .template import Span, Template
from .turns import Turns

Learn = Literal["assistant", "last", "all"]
"""Tokens that are learned: all turns of the assistant, the last of them, or every token, but for messages of the
assistant with a weight of 0."""


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


def render(
    template: Template, conversation: Conversation, *, learn: Learn = "assistant", pattern: str = ""
) -> Segments:
    """The text of a conversation, and what of it is learned: the assistant's words and the token that ends its turn.

    Headers are not learned, nor is what a template writes after the end of a turn, such as the line break of ChatML.
    A message's `weight` is that of its tokens; with a weight of 0 it is not learned. What a template rewrites is
    learned as it stands in this text. A template's `{% generation %}` tags decide where the assistant's words are;
    without them the turns are found as the module `turns` describes. Messages of the conversation's context are not
    learned, unless all is.

    Args:
        template: writes the text.
        conversation: the messages.
        learn: what of the text is learned.
        pattern: a regular expression; of what is learned, only its matches are. Empty for all.

    Raises:
        ConfigError: naming the record: the template fails on it, nothing is learned of it, the turns can't be told
            from the rest, or all is learned and a message of another role has a weight of 0.
    """
    segments = _rendered(template, conversation, learn)
    return _matching(segments, pattern, conversation.where) if pattern else segments


def _matching(segments: Segments, pattern: str, where: str) -> Segments:
    weights = segments.weights or (1.0,) * len(segments.learned)
    found = [
        ((start + match.start(), start + match.end()), weight)
        for (start, stop), weight in zip(segments.learned, weights, strict=True)
        for match in re.finditer(pattern, segments.text[start:stop])
    ]
    made = _segments(segments.text, found)
    if not made.learned:
        raise ConfigError(f"{where}: nothing that the assistant says matches {pattern!r}, so that nothing is learned.")
    return replace(made, literal=segments.literal)


def _rendered(template: Template, conversation: Conversation, learn: Learn) -> Segments:
    try:
        text, tagged = template.render(conversation.messages, conversation.tools)
        turns = [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if learn == "all":
            weighed = _weighed(conversation)
            return _segments(text, _filled(text, _found(template, conversation, text, tagged, weighed)))
        wanted = conversation.learned[-1:] if learn == "last" else conversation.learned
        if not wanted:
            raise ConfigError("every turn of the assistant has a weight of 0, so that nothing is learned.")
        if tagged is not None and wanted == turns and all(conversation.weight(at) == 1 for at in wanted):
            return Segments(text, tuple(tagged))
        return _segments(text, _found(template, conversation, text, tagged, wanted))
    except ConfigError as error:
        raise ConfigError(f"{conversation.where}: {error}") from error


def _weighed(conversation: Conversation) -> list[int]:
    """The assistant's messages with a weight other than 1.

    Raises:
        ConfigError: another role's message has one: where its tokens end can't be told.
    """
    weighed = [at for at in range(len(conversation.messages)) if conversation.weight(at) != 1]
    for at in weighed:
        if (role := conversation.messages[at]["role"]) != "assistant":
            raise ConfigError(
                f"messages[{at}] ({role}) has a weight of 0, but learn = 'all' learns it: leave the weight out, or "
                "learn the assistant's turns only."
            )
    return weighed


def _found(
    template: Template,
    conversation: Conversation,
    text: str,
    tagged: Sequence[Span] | None,
    wanted: Sequence[int],
) -> list[tuple[Span, float]]:
    """The spans of some of the assistant's messages in a rendering, each with its message's weight."""
    turns = [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if tagged is not None and len(tagged) == len(turns):
        found = zip(turns, tagged, strict=True)
        return [(span, conversation.weight(at)) for at, span in found if at in wanted]
    if not wanted:
        return []
    finder = Turns(template, conversation.messages, conversation.tools, text)
    spans = [(span, conversation.weight(at)) for at in wanted for span in finder.spans(at)]
    if tagged is None:
        return spans
    return [
        (one, weight)
        for one in tagged
        for weight in [weight for (start, stop), weight in spans if one[0] < stop and start < one[1]][:1]
    ]


def _filled(text: str, spans: Iterable[tuple[Span, float]]) -> list[tuple[Span, float]]:
    """The same spans, and all that is between them with a weight of 1."""
    found, last = list[tuple[Span, float]](), 0
    for span, weight in sorted(spans):
        found += [((last, span[0]), 1.0), (span, weight)]
        last = span[1]
    return [*found, ((last, len(text)), 1.0)]


def _segments(text: str, spans: Iterable[tuple[Span, float]]) -> Segments:
    kept = [(span, weight) for span, weight in spans if span[0] < span[1] and weight]
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
            learned[at] = learned[at] or before
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

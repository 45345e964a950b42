"""Long texts in parts that encode to the same tokens as the whole.

The tokenizers library keeps offsets and strings of each token until a text is done, some 140 bytes per character, so
a long text is encoded part by part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

PART = 1 << 16
"""Characters of a part, about."""
_WINDOW, _CONTEXT, _TRIES = 64, 16, 64
"""Characters on each side of a cut that decide about it, those that a part begins with from the part before, and how
many cuts are tried before a part is made longer."""
_WORD_END = re.compile(r"(?<=\w)(?=\W)")

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]


def parts(document: bytes, encode: Encode, *, size: int = PART) -> Iterator[tuple[str, int]]:
    """A text in parts, each with the number of its first ids that are not its own.

    A part after the first one begins with some characters of the part before, so that a tokenizer that puts a space or
    a prefix before each text puts it there. A cut lies at a word's end, where the characters around it have the same
    ids with the cut as without; the ids of the parts are those of the whole text if no token depends on more than
    that. A part grows until there is such a place.

    Args:
        document: UTF-8.
        encode: ids of several texts.
        size: of a part, in characters.
    """
    text, rest, foreign, least = "", memoryview(document), 0, size
    while True:
        while rest and len(text) < least + size + _WINDOW:
            block = _block(rest, size)
            text, rest = text + str(block, "utf-8"), rest[len(block) :]
        if not rest and len(text) <= least:
            yield text, foreign
            return
        cut, known = _cut(text, least, size, encode)
        if cut:
            yield text[:cut], foreign
            text, foreign, least = text[cut - _CONTEXT :], known, size + _CONTEXT
        else:
            least += size


def _cut(text: str, least: int, size: int, encode: Encode) -> tuple[int, int]:
    """A place to cut that many characters into the text, and the ids of the characters before it that the next part
    begins with; 0 where there is none."""
    for place in islice(_WORD_END.finditer(text, least, least + size), _TRIES):
        cut = place.start()
        before, shared, after = text[cut - _WINDOW : cut], text[cut - _CONTEXT : cut], text[cut : cut + _WINDOW]
        whole, left, both, right = encode([before + after, before, shared + after, shared])
        known = len(right)
        if whole == [*left, *both[known:]] and both[:known] == right:
            return cut, known
    return 0, 0


def _block(rest: memoryview, size: int) -> memoryview:
    """The next bytes, up to the end of a character."""
    while size < len(rest) and rest[size] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        size += 1
    return rest[:size]

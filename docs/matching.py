"""Lines of a command's output, found for what stands around their numbers."""

from __future__ import annotations

import re

NUMBER = re.compile(
    r"\[ *\d+%\]|[▁▂▃▄▅▆▇█]+|[-+]?\d[\d.,:]*(e[+-]\d+)?[kMGT]?|\b(KiB|MiB|GiB|GB|MB)\b|just now|─+|[━╸╺]+"
)
GAP = "…"
INTERRUPT = "^C"


class StaleError(Exception):
    """A page shows what a command does not print."""


def matched(shown: list[str], output: list[str]) -> str:
    """The lines of the output that are shown, in its words.

    Raises:
        StaleError: names the first line that the output lacks.
    """
    farthest = [0]
    lines = _match(shown, 0, output, 0, free=False, farthest=farthest)
    if lines is None:
        raise StaleError(repr(shown[farthest[0]]))
    return "".join(f"{line}\n" for line in lines)


def _match(
    shown: list[str], first: int, output: list[str], at: int, *, free: bool, farthest: list[int]
) -> list[str] | None:
    """What the lines shown from `first` are, in the words of the output from `at`, or None.

    Args:
        free: lines may be left out before the first.
        farthest: the last line that was looked for.
    """
    if first == len(shown):
        return []
    farthest[0] = max(farthest[0], first)
    line = shown[first]
    if line.strip() == GAP or line.startswith(INTERRUPT):
        rest = _match(shown, first + 1, output, at, free=free or line.strip() == GAP, farthest=farthest)
        return None if rest is None else [line, *rest]
    wanted, start = masked(line), line.split()[:2]
    places = [
        n for n in range(at, len(output) if free else min(at + 1, len(output))) if _fits(wanted, masked(output[n]))
    ]
    for place in sorted(places, key=lambda n: output[n].split()[:2] != start):  # the same step first
        rest = _match(shown, first + 1, output, place + 1, free=False, farthest=farthest)
        if rest is not None:
            return [_shortened(line, output[place].rstrip()), *rest]
    return None


def masked(line: str) -> str:
    """Without numbers, units and columns."""
    return NUMBER.sub("#", " ".join(line.split()))


def _fits(shown: str, printed: str) -> bool:
    """Whether a line is printed as it is shown, but for what ` … ` leaves out in its middle."""
    head, gap, tail = shown.partition(f" {GAP} ")
    return printed.startswith(head) and printed.endswith(tail) if gap else shown == printed


def _shortened(shown: str, printed: str) -> str:
    """What is printed, less what the shown line leaves out."""
    head, gap, tail = shown.partition(f" {GAP} ")
    if not gap:
        return printed
    first = next(n for n in range(len(printed)) if masked(printed[:n]) == masked(head) and printed[n] == " ")
    last = next(n for n in range(len(printed)) if masked(printed[n:]) == masked(tail) and printed[n - 1] == " ")
    return f"{printed[:first]}{gap}{printed[last:]}"

"""Short lists of module names and ranks."""

from __future__ import annotations

from forge_train.base.format import format_list

SHOWN = 3


def abbreviated(names: list[str]) -> str:
    """`2: embedding, head`, `33: layers.0 … layers.31 (32), head`: numbered names are folded, a few shown."""
    runs: dict[tuple[str, str], list[int]] = {}
    for name in sorted(names, key=_by_number):
        parts = name.split(".")
        at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
        key = (name, "") if at is None else (".".join(parts[:at]), ".".join(parts[at + 1 :]))
        runs.setdefault(key, []).append(-1 if at is None else int(parts[at]))
    texts = [_run(before, after, numbers) for (before, after), numbers in runs.items()]
    return f"{len(names)}: {format_list(texts, SHOWN)}"


def _by_number(name: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _run(before: str, after: str, numbers: list[int]) -> str:
    def name(number: int) -> str:
        return ".".join(part for part in (before, str(number) if number >= 0 else "", after) if part)

    if len(numbers) < SHOWN or numbers != list(range(numbers[0], numbers[-1] + 1)):
        return ", ".join(map(name, numbers[:SHOWN])) + (f" … ({len(numbers)})" if len(numbers) > SHOWN else "")
    return f"{name(numbers[0])} … {name(numbers[-1])} ({len(numbers)})"


def group_list(found: list[range]) -> str:
    """`0 1 | 2 3`, `0 8 16 … 504 | 1 9 17 … 505 | … (8)`."""
    shown = found if len(found) <= 2 * SHOWN else found[:2]
    more = f" | … ({len(found)})" if len(shown) < len(found) else ""
    return " | ".join(_ranks(group) for group in shown) + more


def _ranks(group: range) -> str:
    if len(group) <= 2 * SHOWN:
        return " ".join(map(str, group))
    return f"{' '.join(map(str, group[:3]))} … {group[-1]}"

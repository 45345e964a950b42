"""Labelled data made of Python's own standard library, which lies on every machine that runs these tests."""

from __future__ import annotations

import io
import json
import keyword
import random
import sysconfig
import token
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
PACKAGES = ("asyncio", "email", "json", "tkinter", "unittest", "xml")
SIZE = 120
"""Characters of a passage."""


def passages(package: str, count: int) -> list[str]:
    """Stretches of the sources of a package, cut at ends of lines."""
    found: list[str] = []
    for file in sorted((LIBRARY / package).rglob("*.py")):
        if "test" in file.parts:
            continue
        text = ""
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.strip().isascii() and line.strip():
                text += line.strip()[:SIZE] + "\n"
            if len(text) >= SIZE:
                found.append(text[:SIZE])
                text = ""
    random.Random(0).shuffle(found)
    return found[:count]


def write(path: Path, records: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def packages(path: Path, names: tuple[str, ...] = PACKAGES, count: int = 400) -> Path:
    """Which package a passage is from."""
    return write(path, ({"text": text, "label": name} for name in names for text in passages(name, count)))


def write_tasks(folder: Path, texts: Iterable[tuple[str, str]]) -> None:
    """Labels, pairs and preferences of the same short texts, which come with the names of their packages."""
    texts = list(texts)
    write(folder / "classify.jsonl", ({"text": text, "label": name} for name, text in texts))
    write(folder / "embed.jsonl", ({"anchor": text[:20], "positive": text[20:] or "."} for _, text in texts))
    pairs = ({"prompt": "p", "chosen": text[:24], "rejected": text[:24][::-1] + "!"} for _, text in texts)
    write(folder / "reward.jsonl", pairs)


KINDS = ("comment", "keyword", "name", "number", "operator", "string")


def kinds(path: Path, count: int = 400) -> Path:
    """What each word of a stretch of source is, by `tokenize`."""
    return write(path, _kinds(count))


def _kinds(count: int) -> Iterator[dict[str, list[str]]]:
    made = 0
    for file in sorted((LIBRARY / "email").rglob("*.py")) + sorted((LIBRARY / "json").rglob("*.py")):
        words: list[str] = []
        labels: list[str] = []
        for one in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
            text = one.string.strip()
            if not text or "\n" in text or len(text) > 40 or not text.isascii():
                continue
            words.append(text)
            labels.append(_kind(one))
            if sum(map(len, words)) + len(words) > SIZE - 42:
                yield {"tokens": words, "labels": labels}
                words, labels, made = [], [], made + 1
                if made == count:
                    return


def _kind(one: tokenize.TokenInfo) -> str:
    if one.type == token.NAME:
        return "keyword" if keyword.iskeyword(one.string) else "name"
    names = {token.COMMENT: "comment", token.NUMBER: "number", token.STRING: "string"}
    return names.get(one.type, "operator")


def neighbours(path: Path, count: int = 1200) -> Path:
    """Two halves of one passage belong together."""
    texts = [text for name in PACKAGES for text in passages(name, count // len(PACKAGES))]
    return write(path, ({"anchor": one[: SIZE // 2], "positive": one[SIZE // 2 :]} for one in texts))


def preferences(path: Path, count: int = 600) -> Path:
    """The beginning of a passage as it is, and with each of its words spelled backwards."""
    texts = [text[: SIZE // 2].split() for name in PACKAGES for text in passages(name, count // len(PACKAGES))]
    pairs = [(" ".join(words), " ".join(word[::-1] for word in words)) for words in texts]
    return write(path, ({"prompt": "Python?", "chosen": a, "rejected": b} for a, b in pairs if a != b))

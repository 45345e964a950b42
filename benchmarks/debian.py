"""A gigabyte of real text: Debian's documentation packages, as documents in .jsonl files.

    python benchmarks/debian.py FOLDER   # FOLDER/<source>/<package>.jsonl; packages that are there already are kept

HTML loses its tags, scripts and styles; plain text, manual pages and dictionaries stay as they are. A page that its
package has twice is kept once, and one of fewer than 200 characters not at all. Needs apt-get, dpkg-deb and a mirror.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

SOURCES = {
    "manuals": (
        *("linux-doc-6.1", "perl-doc", "manpages", "manpages-dev", "manpages-de", "manpages-fr"),
        *("dict-gcide", "debian-handbook", "debian-reference-en", "erlang-doc", "racket-doc", "lilypond-doc-html"),
    ),
    "science": (
        *("python3.11-doc", "python-pandas-doc", "python-scipy-doc", "python-sympy-doc", "python-astropy-doc"),
        *("sagemath-doc", "singular-doc", "gnuradio-doc", "twisted-doc"),
    ),
    "interfaces": (
        *("rust-doc", "openjdk-17-doc", "ghc-doc", "scala-doc", "cppreference-doc-en-html", "libboost1.81-doc"),
        *("qtbase5-doc-html", "libstdc++-12-doc", "libgtkmm-3.0-doc", "libpcl-doc", "wx3.2-doc", "pike8.0-doc"),
        "libfastutil-java-doc",
    ),
}
HTML, PLAIN = frozenset({".html", ".htm", ".xhtml"}), frozenset({".txt", ".rst", ".pod", ".md", ".dz"})
MANUAL = re.compile(r"\.[1-9][a-z]*$")
LEAST = 200
"""Characters of a document."""
BREAKS = frozenset(
    {"address", "blockquote", "br", "dd", "div", "dl", "dt", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p"}
    | {"pre", "section", "table", "td", "th", "tr", "ul"}
)
HIDDEN = frozenset({"script", "style", "head"})


class Page(HTMLParser):
    """The text of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in HIDDEN:
            self._hidden += 1
        elif tag in BREAKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN:
            self._hidden = max(self._hidden - 1, 0)
        elif tag in BREAKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)

    @property
    def text(self) -> str:
        lines = (line.rstrip() for line in "".join(self.parts).split("\n"))
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def text(file: Path) -> str:
    """What a file has to read; empty if it is none to be read."""
    name = file.name.removesuffix(".gz")
    suffix = Path(name).suffix.lower()
    if suffix not in HTML | PLAIN and not (MANUAL.search(name) and "man" in file.parts):
        return ""
    try:
        content = file.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        return ""
    found = content.decode("utf-8", errors="replace")
    if suffix not in HTML:
        return found
    page = Page()
    page.feed(found)
    page.close()
    return page.text


def documents(folder: Path) -> Iterator[str]:
    """The texts of a folder's files, in the order of their names."""
    seen: set[bytes] = set()
    for file in sorted(folder.rglob("*")):
        if file.is_symlink() or not file.is_file():
            continue
        found = text(file)
        identity = hashlib.blake2b(found.encode(), digest_size=16).digest()
        if len(found) >= LEAST and identity not in seen:
            seen.add(identity)
            yield found


def collect(package: str, out: Path) -> int:
    """Write a package's documents; returns their bytes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists():
        with tempfile.TemporaryDirectory(dir=out.parent) as name:
            folder = Path(name)
            subprocess.run(["apt-get", "-qq", "download", package], cwd=folder, check=True, stderr=subprocess.DEVNULL)
            archive = next(folder.glob("*.deb"))
            subprocess.run(["dpkg-deb", "-x", str(archive), str(folder / "unpacked")], check=True)
            part = out.with_suffix(".part")
            with part.open("w", encoding="utf-8") as file:
                for document in documents(folder / "unpacked"):
                    file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
            shutil.rmtree(folder / "unpacked")
            part.replace(out)
    return out.stat().st_size


def collect_all(root: Path) -> None:
    """Write every package's documents that are not there, on two processes."""
    wanted = [(source, package) for source, packages in SOURCES.items() for package in packages]
    with ProcessPoolExecutor(2) as pool:
        outs = [root / source / f"{package}.jsonl" for source, package in wanted]
        sizes = pool.map(collect, [package for _, package in wanted], outs)
        for (source, package), size in zip(wanted, sizes, strict=True):
            print(f"{source} {package} {size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    collect_all(Path(sys.argv[1]))

"""`forge data inspect`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.strict_json import dumps
from forge_train_kit.format import format_plural

from . import screen
from .options import chat_options, json_option, named_values
from .samples import described, legend, print_tokens

if TYPE_CHECKING:
    from forge_train_kit.data.inspection import Findings

WIDTH = 40
"""Characters of the longest bar."""


@click.command(short_help="Look at data: lengths, samples as tokens, duplicates.")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...|DIR")
@click.option(
    "--tokenizer", metavar="T", help="A tokenizer.json, a Hugging Face folder, or bytes (the default for text)."
)
@click.option("--field", metavar="NAME", help="Field of a record that holds its text; text by default.")
@click.option("--dtype", metavar="TYPE", help="Dtype of a file of tokens that does not declare it: uint16 or uint32.")
@click.option("--chat", is_flag=True, help="Records are conversations, which a chat template renders.")
@click.option(
    "--template", metavar="NAME", help="The chat template, like sft.template; by default the tokenizer's own."
)
@click.option(
    "--learn", type=click.Choice(["assistant", "last", "all"]), help="Which part of a conversation is learned."
)
@chat_options
@click.option("--samples", "count", type=click.IntRange(0, 1000), default=3, show_default=True, metavar="N",
              help="How many stretches of tokens to show.")  # fmt: skip
@click.option("--html", metavar="FILE", callback=screen.page, help="Also write an HTML page.")
@json_option
def inspect(sources: tuple[str, ...], count: int, html: str | None, as_json: bool, **asked: Any) -> None:
    """Inspect a DIR of `forge data prepare`, whose files are verified, a file of tokens, or the beginning of
    SOURCES that `forge data prepare` would read.

    \b
    forge data inspect shards
    forge data inspect chats.jsonl --chat --tokenizer model
    forge data inspect train.bin --dtype uint16
    """
    from forge_train_kit.data.inspection import Asked
    from forge_train_kit.data.inspection import inspect as look

    asked |= {name: named_values(f"--{name}", asked[name]) for name in ("rename", "roles")}
    given = {name: value for name, value in asked.items() if value is not None}
    try:
        findings = look(Asked(sources, **given), count=count, told=_told)
    finally:
        _told("")
    if html:
        from .inspect_page import page

        screen.write(Path(html), page(findings))
    if as_json:
        click.echo(dumps(findings.table(), indent=1))
        return
    _show(findings)
    if html:
        click.echo(f"\nWrote {html}.")


def _told(line: str) -> None:
    """A line that overwrites the previous one; only on a terminal."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{line}", nl=False, err=True)


def _show(findings: Findings) -> None:
    from rich.text import Text

    screen.table(
        ("", ""), [(Text(name, style="dim"), screen.visible(text)) for name, text in about(findings)], indent=0
    )
    screen.heading("Tokens of a document")
    screen.table(("", "", ""), list(bars(findings)), right=(0, 2))
    screen.line(f"  {quantiles(findings)}", "dim")
    screen.heading("Duplicates")
    for line in repeated(findings):
        screen.line(f"  {line}")
    if findings.samples:
        screen.heading("Samples")
        screen.line(f"  {legend(masked=findings.learned != findings.tokens)}", "dim")
    for sample in findings.samples:
        screen.line(f"\ndocument {sample.document:,}", "bold")
        print_tokens(sample.tokens)
        for item in sample.items:
            screen.line(described(item), "dim")


def about(findings: Findings) -> Iterator[tuple[str, str]]:
    """A description of the data, in rows of a name and a text."""
    from forge_train.base.format import format_list
    from forge_train_kit.format import format_count

    facts = findings.facts
    what = {
        "prepared": f"{facts.get('path')}, a folder of token shards",
        "tokens": f"{facts.get('path')}, a file of tokens of {facts.get('dtype')}",
        "source": format_list(facts.get("sources", ())),
    }
    yield "data", what[findings.kind]
    for side in ("train", "validation"):
        if side in facts:
            one = facts[side]
            documents, shards = format_plural(one["documents"], "document"), format_plural(one["shards"], "shard")
            yield side, f"{documents}, {one['tokens']:,} tokens in {shards}"
    if findings.kind != "prepared":
        yield "documents", f"{findings.documents:,}"
        yield "tokens", f"{findings.tokens:,}"
    if "items" in facts:
        yield "items", format_list(f"{count:,} of {name!r}" for name, count in facts["items"].items()) or "none"
    if findings.learned != findings.tokens:
        yield "learned", f"{findings.learned:,} tokens ({findings.learned / findings.tokens:.1%})"
    if "bytes" in facts:
        each = facts["bytes"] / findings.tokens
        yield "text", f"{format_count(facts['bytes'])} bytes, {each:.2f} a token"
    if "tokenizer" in facts:
        yield "tokenizer", f"{facts['tokenizer']}, {facts['vocabulary']:,} token ids"
    else:
        yield "tokenizer", f"not known (--tokenizer); the largest id is {facts['largest']:,}"
    if findings.kind == "prepared":
        yield "made of", f"{format_list(facts['sources'])} ({format_plural(facts['source_files'], 'file')})"
        yield "settings", ", ".join(f"{name} = {value}" for name, value in facts["settings"].items())
        yield "verified", "every shard holds what was written"
    elif findings.kind == "source":
        part = f"the first {format_count(facts['bytes'])} bytes of text only, in {facts['files_read']:,} of"
        yield (
            "read",
            f"{part if facts['read'] == 'beginning' else 'all of'} {format_plural(facts['source_files'], 'file')}",
        )


def bars(findings: Findings) -> Iterator[tuple[str, str, str]]:
    """The histogram of lengths: a bin, its bar and its number of documents."""
    most = max(count for _, _, count in findings.lengths.bins)
    for low, high, count in findings.lengths.bins:
        eighths = -(-count * WIDTH * 8 // most)
        bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
        yield f"{low:,}–{high:,}" if high > low else f"{low:,}", bar, f"{count:,}"


def quantiles(findings: Findings) -> str:
    lengths = findings.lengths
    shares = ", ".join(f"{share} %: {tokens:,}" for share, tokens in lengths.quantiles.items())
    return f"{shares}, longest: {lengths.longest:,}, mean: {lengths.mean:,.1f}"


def repeated(findings: Findings) -> Iterator[str]:
    """Sentences about duplicates."""
    found = findings.duplicates
    share = found.exact / found.documents
    yield f"exact: {found.exact:,} of {found.documents:,} documents ({share:.2%}) equal an earlier one"
    scope = "" if found.compared == found.documents else "the first "
    yield (
        f"near: {found.near:,} of {scope}{found.compared:,} documents ({found.near / found.compared:.2%}) resemble an "
        "earlier one, but equal none"
    )

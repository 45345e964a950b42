"""`forge data`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.errors import ConfigError

from . import screen
from .lazy import LazyGroup
from .options import OF_CHATS, chat_options, named_values

if TYPE_CHECKING:
    from forge_train_kit.data.manifest import Manifest
    from forge_train_kit.data.prepare import Report

COMMANDS = {
    "prepare": (".data:prepare", "Make token shards from any source."),
    "inspect": (".inspect:inspect", "Look at data: lengths, samples as tokens, duplicates."),
    "show": (".show:show", "Show what a run does with its data, stage by stage."),
}


@click.group(cls=LazyGroup, table=COMMANDS, short_help="Prepare data, and look at it.")
def data() -> None:
    """Prepare data, and look at it."""


@click.command(short_help="Make token shards from any source.")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--out", required=True, metavar="DIR", help="The folder to make.")
@click.option("--tokenizer", metavar="T", help="A tokenizer.json, a Hugging Face folder, or bytes (the default).")
@click.option("--train-tokenizer", type=int, metavar="N", help="Train a byte-level BPE of N token ids on the text.")
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="[FILES=]NAME",
    help="Field of a record that holds its text (default: text); of some files, as in 'code*.jsonl=content'.",
)
@click.option("--held-out", type=click.FloatRange(0, 1, max_open=True), default=0.01, show_default=True,
              help="Share of the documents to keep for evaluation.")  # fmt: skip
@click.option("--chat", is_flag=True, help="Records are conversations: render them, and mark the learned tokens.")
@click.option("--template", metavar="T", help="The chat template; by default the tokenizer's own.")
@chat_options
@click.option("--map", "maps", multiple=True, metavar="NAME[:OPTION=VALUE,…]",
              help="Change the documents, in the order given: length:least=200, fim:rate=0.5.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Number of processes; all cores by default.")
@click.option("--skip-broken", is_flag=True, help="Leave out files that can't be read, and list them.")
def prepare(
    sources: tuple[str, ...], out: str, tokenizer: str | None, train_tokenizer: int | None, **more: Any
) -> None:
    """Read SOURCES (files, folders, patterns, addresses), tokenise them, and write shards into a folder.

    If a preparation was stopped, the same command continues it where it stopped.
    """
    from forge_train_kit.data.prepare import Preparation, Report
    from forge_train_kit.data.prepare import prepare as perform

    if tokenizer and train_tokenizer is not None:
        raise ConfigError("--tokenizer and --train-tokenizer exclude each other; give only one.")
    if not more["chat"] and (lost := next((name for name in ("template", *OF_CHATS) if more[name]), "")):
        raise ConfigError(f"--{lost.replace('_', '-')}: has no effect without --chat.")
    if more["chat"] and (more["maps"] or train_tokenizer is not None or more["fields"]):
        raise ConfigError("--chat: conversations take no --map, --field or --train-tokenizer.")
    if tokenizer and tokenizer != "bytes" and not Path(tokenizer).expanduser().exists():
        raise ConfigError(
            f"--tokenizer: no such file or folder: {tokenizer}. Expected bytes, a tokenizer.json or its folder."
        )
    wanted = Preparation(
        sources,
        Path(out),
        tokenizer=tokenizer or "bytes",
        train_tokenizer=train_tokenizer or 0,
        field=next((one for one in reversed(more["fields"]) if "=" not in one), "text"),
        fields=tuple((files, name) for files, _, name in (one.rpartition("=") for one in more["fields"]) if files),
        held_out=more["held_out"],
        workers=more["workers"] or len(os.sched_getaffinity(0)),
        skip=more["skip_broken"],
        chat=more["chat"],
        template=more["template"] or "",
        rename=named_values("--rename", more["rename"]),
        roles=named_values("--roles", more["roles"]),
        each_turn=more["each_turn"],
        split_special_tokens=more["split_special_tokens"],
        maps=more["maps"],
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that its workers end as on Ctrl-C
    report = Report(_show)
    manifest = perform(wanted, report)
    _summary(Path(out), manifest, report)


def _show(line: str) -> None:
    """A line that overwrites the previous one; only on a terminal."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{line}", nl=False, err=True)


def _summary(out: Path, manifest: Manifest, report: Report) -> None:
    from forge_train_kit.format import format_duration, format_unit

    for file, reason in report.skipped.items():
        click.echo(f"{click.style('Left out:', fg='yellow')} {file}: {reason}", err=True)
    tokens, size = manifest.total("tokens"), manifest.total("bytes")
    rows = [
        (side, f"{manifest.total('documents', side):,}", f"{manifest.total('tokens', side):,}", len(shards))
        for side, shards in manifest.shards.items()
    ]
    screen.table(("", "documents", "tokens", "shards"), [tuple(map(str, row)) for row in rows], right=(1, 2, 3))
    rate = f", {format_unit(report.text / report.seconds, 'B')}/s" if report.read else ""
    screen.line(
        f"{size / max(tokens, 1):.2f} bytes a token, {manifest.tokenizer['vocabulary']:,} token ids · "
        f"{format_duration(report.seconds)}{rate}",
        "dim",
    )
    if not manifest.shards["validation"] and manifest.settings["held_out"]:
        screen.line("No document was held out: prepare with more --held-out, or train with evaluate_every=0.")
    packing = " -s tokens.packing=best_fit" if "template" in manifest.settings else ""
    screen.line(f"Train on it: forge train -p tokens -s tokens.path={out}{packing}")

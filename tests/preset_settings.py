"""What makes a preset small enough for a test."""

from __future__ import annotations

from pathlib import Path

ALL = (
    "run.device=cpu",
    "train.steps=2",
    "train.global_batch=4",
    "train.sequence=32",
    "train.evaluate_every=2",
    "train.evaluate_batches=1",
    "decoder.layers=1",
    "log.every=1",
)
OWN = {
    "compile": ("compile.backend=aot_eager",),  # inductor's C++ takes a minute
    "quickstart": ("text.baseline=false", "sample.tokens=4"),
}


def values(text: Path, name: str) -> tuple[str, ...]:
    """Assignments for one preset."""
    return (*ALL, f"text.path={text}", *OWN.get(name, ()))


def settings(text: Path, name: str) -> list[str]:
    """The same as options."""
    return [word for value in values(text, name) for word in ("-s", value)]

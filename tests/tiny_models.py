"""Tiny models of forge's own plugins: composed with random weights, or trained for some steps."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from forge_train.compose.compose import compose
from forge_train.contract.model import Model
from forge_train.engine import train
from forge_train.plugin.job import Job
from forge_train.store.manifest import hash_of
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.opening import lone_job

DECODER = (
    *("decoder.dim=32", "decoder.layers=2", "decoder.heads=4", "decoder.kv_heads=2", "decoder.hidden=48"),
    *("decoder.max_sequence=64", "decoder.std=0.4"),
)
TRAIN = ("run.device=cpu", "train.steps=3", "train.global_batch=2", "train.micro_batch=2", "train.sequence=32")


def request(*values: str, plugins: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> Request:
    return Request(plugins=plugins, without=("console", "tensorboard", *without), set=(*DECODER, *TRAIN, *values))


def composed(*values: str, **more: Any) -> tuple[Job, Model]:
    """A decoder with random weights."""
    setup = resolve(request(*values, **more))
    job = lone_job(setup, Path("nowhere"))
    return job, compose(job).model


def text_file(folder: Path) -> Path:
    file = folder / "text.txt"
    file.write_text("\n\n".join(f"The number {n} follows {n - 1}: äöü €. " * 3 for n in range(80)), encoding="utf-8")
    return file


def trained(folder: Path, *values: str, **more: Any) -> Path:
    """A finished run."""
    values = (f"text.path={text_file(folder)}", f"text.cache={folder / 'cache'}", "text.held_out=0.2", *values)
    return train(resolve(request(*values, **more)), run_dir=folder / "runs").run


def reseal(checkpoint: Path) -> Path:
    """Have a checkpoint's manifest say what its files hold now, as somebody would who means harm."""
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    kind = manifest.get("hash", "sha256")
    for name in manifest["files"]:
        content = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), kind: hash_of(io.BytesIO(content), kind)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return checkpoint


def flip(file: Path) -> None:
    """Damage a file without a trace in its size."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

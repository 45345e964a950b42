"""Transcripts of commands, made by typing them. Numbers differ between machines; what stands around them does not."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MINE = """\
preset = "quickstart"

[train]
steps = 60
sequence = 128
evaluate_every = 30

[decoder]
dim = 64
layers = 2

[text]
path = "texts"

[sample]
prompt = "The "
tokens = 80
"""
COMMANDS = (
    ("forge config show mine.toml", r"train\.(steps|sequence)|text\.path|decoder\.dim"),
    ("forge plan mine.toml", r"^Memory|parameters .*exact|activations|peak "),
    (
        "forge train mine.toml --name first",
        r"^text:|^forge ·|step 30/|step 60/60 · held|^done|^Next|^  (write|its|train|Hugging)",
    ),
    ("forge runs list", r"."),
    ("forge runs report first -o first.html", r"."),
)
"""Command, and which lines of its output are shown."""
NUMBER = re.compile(r"[▁▂▃▄▅▆▇█]+|\d[\d.,:]*(e[+-]\d+)?[kMGT]?|\b(KiB|MiB|GiB)\b|just now| {2,}")


def mine() -> str:
    """The configuration that the commands are about."""
    return f'```toml title="mine.toml"\n{MINE}```'


def first_run() -> str:
    """What the commands print, in a folder with some text."""
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder, "texts")
        texts.mkdir()
        (texts / "apache.txt").write_bytes((ROOT / "LICENSE").read_bytes())  # a text that does not change
        Path(folder, "mine.toml").write_text(MINE, encoding="utf-8")
        parts = [f"```console\n{_typed(command, keep, folder)}```" for command, keep in COMMANDS]
    return "\n\n".join(parts)


def _typed(command: str, keep: str, folder: str) -> str:
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": f"{folder}/.cache",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-m", "forge_train_cli", *shlex.split(command)[1:]],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr}")
    lines: list[str] = []
    for line in done.stdout.replace(folder, ".").splitlines():
        if line.strip() and re.search(keep, line):
            lines.append(line.rstrip())
        elif lines and lines[-1] != "…" and line.strip():
            lines.append("…")
    return "\n".join([f"$ {command}", *lines]) + "\n"


def masked(text: str) -> str:
    """Without numbers, units and columns."""
    return NUMBER.sub("#", text)

"""The project's title as a command: experts in float8, alone and over ep, fsdp2 and tp.

How near their loss comes to that of bf16 is measured by `benchmarks/run.py low_precision`.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from forge_cli import forge
from forge_train.engine import train as train_here
from forge_train.run.records import TIMINGS, read
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.e2e, pytest.mark.dist]

SMALL = ("train.global_batch=4", "train.sequence=64", "train.evaluate_every=0", "checkpoint.every=0", "log.every=1")
OVER_FOUR = ("parallel.ep=2", "parallel.tp=2")
WITHOUT = ("sample", "tensorboard")
Found = tuple[list[dict[str, Any]], Any]
"""Lines of metrics, and what was composed, of a quickstart with few tokens."""


def train(folder: Path, plugins: str, steps: int, *sets: str, nproc: int = 1) -> Found:
    """By the command, in this process or in as many as are asked for."""
    settings = [part for one in (*SMALL, *sets, f"train.steps={steps}") for part in ("-s", one)]
    name = plugins.replace(",", "-")
    several = ("--nproc", nproc) if nproc > 1 else ()
    with contextlib.chdir(folder):
        ended = forge(
            "train", "--plugins", plugins, *settings, "--without", ",".join(WITHOUT), "--name", name, *several
        )
    assert ended.code == 0, ended.out + ended.err
    return found(folder / "runs" / name)


def found(run: Path) -> Found:
    lines = [{key: value for key, value in line.items() if key not in TIMINGS} for line in read(run / "metrics.jsonl")]
    return lines, json.loads((run / "composition.json").read_text(encoding="utf-8"))


def rank(folder: str, plugins: list[str], sets: list[str]) -> str:
    """The same on a rank that is there already."""
    request = Request("quickstart", tuple(plugins), without=(*WITHOUT, "console"), set=tuple(sets))
    setup = resolve(request, world=int(os.environ["WORLD_SIZE"]))
    return str(train_here(setup, run_dir=Path(folder), resume="never").run)


def test_experts_in_float8_learn_the_quickstart(tmp_path: Path) -> None:
    lines, composed = train(tmp_path, "fp8,moe", 40)
    losses = [line["loss"] for line in lines]
    assert losses[0] > 5.0
    assert max(losses[-5:]) < 3.5
    note = next(one["note"] for one in composed if one["slot"] == "fp8")
    assert "12 linear, 3 groups of experts" in note
    again, same = train(tmp_path, "moe,fp8", 5)
    assert [line["loss"] for line in again][:1] == losses[:1], "warm-up is a share of the run, the first step is not"
    assert same == composed


@pytest.mark.extended
def test_so_they_do_over_ep_fsdp2_and_tp_in_any_order(ranks: Pool, tmp_path: Path) -> None:
    alone, _ = train(tmp_path, "fp8,moe", 3)
    lines, composed = train(tmp_path, "fp8,moe,ep,fsdp2,tp", 3, *OVER_FOUR, nproc=4)
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in alone], rel=1e-3)
    assert [line["grad_norm"] for line in lines] == pytest.approx([line["grad_norm"] for line in alone], rel=1e-2)
    order, sets = ["tp", "fsdp2", "moe", "fp8", "ep"], [*SMALL, *OVER_FOUR, "train.steps=3"]
    first, *_ = ranks.run(rank, 4, folder=str(tmp_path / "runs"), plugins=order, sets=sets)
    again, same = found(Path(first))
    assert same == composed
    assert again == lines

"""The project's title as a command: experts in float8, alone and over ep, fsdp2 and tp.

How near their loss comes to that of bf16 is measured by `benchmarks/run.py low_precision`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge_cli import forge_process
from forge_train.ground.records import TIMINGS, read

pytestmark = [pytest.mark.e2e, pytest.mark.accept("moe", 1)]

SMALL = ("train.global_batch=4", "train.sequence=64", "train.evaluate_every=0", "checkpoint.every=0", "log.every=1")
OVER_FOUR = ("--nproc", 4, "-s", "parallel.ep=2", "-s", "parallel.tp=2")


def train(folder: Path, plugins: str, steps: int, *more: object) -> tuple[list[dict[str, Any]], Any]:
    """Lines of metrics, and what was composed, of a quickstart with few tokens."""
    settings = [part for one in (*SMALL, f"train.steps={steps}") for part in ("-s", one)]
    name = plugins.replace(",", "-")
    ended = forge_process(
        "train", "--plugins", plugins, *settings, "--without", "sample,tensorboard", "--name", name, *more,
        cwd=folder, timeout=600,
    )  # fmt: skip
    assert ended.code == 0, ended.out + ended.err
    run = folder / "runs" / name
    lines = [{key: value for key, value in line.items() if key not in TIMINGS} for line in read(run / "metrics.jsonl")]
    return lines, json.loads((run / "composition.json").read_text(encoding="utf-8"))


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


@pytest.mark.dist
def test_so_they_do_over_ep_fsdp2_and_tp_in_any_order(tmp_path: Path) -> None:
    alone, _ = train(tmp_path, "fp8,moe", 3)
    lines, composed = train(tmp_path, "fp8,moe,ep,fsdp2,tp", 3, *OVER_FOUR)
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in alone], rel=1e-3)
    assert [line["grad_norm"] for line in lines] == pytest.approx([line["grad_norm"] for line in alone], rel=1e-2)
    again, same = train(tmp_path, "tp,fsdp2,moe,fp8,ep", 3, *OVER_FOUR)
    assert same == composed
    assert again == lines

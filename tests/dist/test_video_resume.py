"""Training on clips with parts that thaw: killed, it repeats the uninterrupted run, on any number of ranks."""

from __future__ import annotations

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from crossed import marked
from forge_cli import environment, forge_process
from forge_train import engine
from forge_train.checkpoint import checkpoint
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train.mesh.world import World
from forge_train.run.records import TIMINGS, read
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.process import unchanged
from forge_train_tools.testing import Pool
from saving import contents

pytestmark = [pytest.mark.dist, pytest.mark.e2e]

STEPS, KILLED, SAVED = 6, 4, 2
CONFIG = """\
plugins = ["multimodal", "video", "freeze", "fsdp2", "dying:DiesAsked"]
[run]
device = "cpu"
[train]
steps = 6
global_batch = 12
micro_batch = 3
sequence = 64
evaluate_every = 3
evaluate_batches = 1
[checkpoint]
every = 2
keep = 3
[log]
every = 1
[decoder]
dim = 16
layers = 1
heads = 2
max_sequence = 64
[multimodal]
path = "{folder}/clips.jsonl"
cache = "{folder}/cache"
held_out = 0.2
prefetch.workers = 2
[video]
size = 16
patch = 8
frames = 4
dim = 12
layers = 1
heads = 1
times = true
[freeze]
parameters = ["fusion.enter.encoders.video.vision.*", "layers.*", "embedding.*"]
thaw = [{{ match = "fusion.enter.encoders.video.vision.*", steps = 3 }}, {{ match = "layers.*", steps = 4 }}]
"""
"""The connector and the head learn first; the run that is killed in step 4 goes on after step 2, before both thaws."""


def clip(path: Path, number: int) -> None:
    """A bright square that moves in a direction of its own."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        for at in range(8):
            picture = np.full((16, 16, 3), 10 * number, np.uint8)
            picture[(at * number) % 12 :][:4, 2:8] = 250
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def train(folder: str, name: str) -> None:
    """What each rank does: start the run, or go on with it."""
    with unchanged():
        setup = resolve(Request(config=f"{folder}/run.toml", set=(f"run.name={name}",)), world=World.here().size)
        finished = engine.train(setup, run_dir=Path(folder) / "runs")
    assert not finished.error


def killed(folder: Path, name: str) -> None:
    """Start the command, whose second rank kills itself."""
    env = environment(DIES_AT=str(KILLED))
    env["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent}"
    asked = ("train", "run.toml", "--quiet", "--name", name, "--nproc", 2)
    ended = forge_process(*asked, preloaded=True, cwd=folder, env=env)
    assert ended.code == 1
    assert "Rank 1 was killed by SIGKILL" in ended.err


def numbers(run: Path) -> list[dict[str, Any]]:
    """Every line of metrics, without what differs from run to run."""
    return [{key: value for key, value in one.items() if key not in TIMINGS} for one in read(run / "metrics.jsonl")]


def at(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Those of a checkpoint."""
    state = checkpoint.load(at(run, step), {}, DistributedContext(Layout(), torch.device("cpu")))
    model: dict[str, torch.Tensor] = state["model"]
    return model


@pytest.fixture(scope="module")
def folder(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run on two ranks that nothing interrupted, `whole`, and one that was killed, `killed`."""
    folder = tmp_path_factory.mktemp("video")
    records = []
    for number in range(20):
        clip(folder / f"{number}.mp4", number)
        records.append({"text": f"{'<video>' * (number % 3)}{number}", "videos": [f"{number}.mp4"] * (number % 3)})
    (folder / "clips.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    (folder / "run.toml").write_text(CONFIG.format(folder=folder), encoding="utf-8")
    ranks.run(train, 2, folder=str(folder), name="whole")
    killed(folder, "killed")
    return folder


@pytest.mark.parametrize("world", marked([1, 2, 3], [3]))
def test_goes_on_as_if_nothing_had_happened(ranks: Pool, folder: Path, world: int) -> None:
    resumed, whole = folder / "runs" / f"on-{world}", folder / "runs" / "whole"
    shutil.copytree(folder / "runs" / "killed", resumed)
    ranks.run(train, world, folder=str(folder), name=resumed.name)
    assert [one["step"] for one in read(resumed / "events.jsonl") if one["event"] == "resumed"] == [SAVED]
    if world == 2:
        assert numbers(resumed) == numbers(whole)
        assert contents(at(resumed, STEPS)) == contents(at(whole, STEPS))
        return
    for line, expected in zip(numbers(resumed), numbers(whole), strict=True):
        assert line["tokens"] == expected["tokens"], "the same global batch"
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    found = weights(resumed, STEPS)
    for name, tensor in weights(whole, STEPS).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_what_is_compared_sees_and_thaws(folder: Path) -> None:
    whole = folder / "runs" / "whole"
    assert len({line["loss"] for line in numbers(whole)}) == STEPS
    saved = [weights(whole, step) for step in (2, 4, 6)]
    moved = [
        {name for name in after if not torch.equal(before[name], after[name])} for before, after in pairwise(saved)
    ]
    for begin, at_first in (("fusion.enter.encoders.video.vision.layers.", True), ("layers.", False)):
        names = {name for name in saved[0] if name.startswith(begin) and name.endswith(".weight")}
        assert names
        assert [names <= some for some in moved] == [at_first, True], begin
    assert "embedding.weight" not in moved[0] | moved[1]
    assert {name for name in saved[0] if ".video.connector." in name} <= moved[0]

"""Law 9 on a CUDA device that is not there: its tensors lie on the host, but a mix of devices is refused, and what
would make the host wait between logged steps is counted, with the line of Forge that asks for it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from crossed import marked
from forge_train.mesh.tensors import on_host, remember_host
from forge_train.registry.discovery import discover, load
from pretended_cuda import build, cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.unit,
    pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "it is there"),
]
CHILD = Path(build.__file__).with_name("child.py")
MOE, FLEX = "plugins/forge_train_plugins/experts/", "plugins/forge_train_plugins/attention/_flex.py"
ONCE = "plugins/forge_train_plugins/modalities/_vision/once.py"
NOT_THERE = "only here: on a device one kernel does it, and the CPU's stand-in for that reads"
WAITS = [
    ("loss_scaler", "plugins/forge_train_plugins/precision/loss_scaler.py", "fp16: leaves out a step that overflows"),
    ("skip_step", "plugins/forge_train_plugins/optimizers/skip_step.py", "decides on the host, from earlier norms"),
    ("moe", f"{MOE}_moe/experts.py", "fp32 has no grouped product, so experts are looped over; in bf16, only here"),
    ("ep", f"{MOE}_moe/experts.py", NOT_THERE),
    ("ep", f"{MOE}_alltoall/transport.py", "the host tells NCCL how many rows each rank gets"),
    (
        "cp",
        "plugins/forge_train_plugins/parallel/_cp/kernel.py",
        "once a batch: its documents decide who computes what",
    ),
    ("moe", "torch: sync_d2h", NOT_THERE),
    ("ep", "torch: sync_d2h", NOT_THERE),
    ("mot", "core/forge_train_kit/model/kinds.py", "once a batch: how many positions of each kind it has"),
    ("once for each image", ONCE, "once a batch: what an item holds says which features are known"),
    ("flex", FLEX, NOT_THERE),
    ("flex", "torch: sync_h2d", NOT_THERE),
    ("fsdp2, offload", "", "weights are updated on the host, once their gradients are there"),
]
"""(Case, place, why the host may wait there between logged steps.)"""


def plugins() -> dict[str, list[str]]:
    """Plugins that come with Forge → what their own example asks for."""
    known = [one for one in discover() if one.object.startswith("forge_train_plugins.")]
    return {one.name: [*load(one).facts.get("check.example", ())] for one in known}


def write(folder: Path) -> None:
    folder.mkdir()

    def lines(name: str, records: list[Any]) -> None:
        (folder / name).write_text("".join(f"{json.dumps(one)}\n" for one in records), encoding="utf-8")

    lines("labels.jsonl", [{"text": text, "label": "ab"[n % 2]} for n, text in enumerate(cases.TEXTS)])
    lines("pairs.jsonl", [{"anchor": text, "positive": text[::-1]} for text in cases.TEXTS])
    lines("preferred.jsonl", [{"prompt": text, "chosen": text, "rejected": text[::-1]} for text in cases.TEXTS])
    chat = [[{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}] for text in cases.TEXTS]
    lines("chats.jsonl", [{"messages": messages} for messages in chat])
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the model reads a line of text\n" * 400, encoding="utf-8")


def trained(folder: Path, worlds: dict[int, list[cases.Case]]) -> dict[int, list[dict[str, Any]]]:
    """Ranks → the results of their cases, of each rank."""
    asked, stores = [], list[TCPStore]()
    for ranks, given in worlds.items():
        write(own := folder / str(ranks))
        for one in given if ranks > 1 else ():
            stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            one["port"] = str(stores[-1].port)  # held from here on: nobody else can take it
        asked.append({"cases": given, "folder": str(own), "ranks": ranks})
    (file := folder / "worlds.json").write_text(json.dumps(asked), encoding="utf-8")
    environment = {**os.environ, "PRETENDED_CUDA": str(build.library()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    places = {ranks: [folder / str(ranks) / str(rank) for rank in range(ranks)] for ranks in worlds}
    said = [place.with_suffix(".txt") for own in places.values() for place in own]
    assert not done.returncode, "\n".join([done.stderr, *(one.read_text() for one in said if one.exists())])
    return {ranks: [json.loads(one.with_suffix(".json").read_text()) for one in own] for ranks, own in places.items()}


EXTENDED = (
    *("plugins check flash", "verify"),
    *("flash", "images", "saved", "constant", "inverse_sqrt", "piecewise", "polynomial", "rex", "wsd"),
)
"""CI trains what they do: flash deterministic, images once for each, saved twice, and `cosine` and `linear` of the
schedules, which give the loop a factor on the host."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The results of those cases that are asked for, on one rank and on two; importing for them takes longest."""
    folder = tmp_path_factory.mktemp("pretended")
    items = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    every = cases.one_process(str(folder / "1"), plugins())
    worlds = {1: [one for one in every if one["name"] in asked or "does" in one], 2: cases.TWO_RANKS}
    using = {name for item in items for name in item.fixturenames}
    return trained(folder, {ranks: worlds[ranks] for ranks, name in USING.items() if name in using})


USING = {1: "one_process", 2: "two_ranks"}
"""Ranks → the fixture that gives their results."""


@pytest.fixture(scope="module")
def one_process(results: dict[int, Any]) -> dict[str, Any]:
    return results[1][0]


@pytest.fixture(scope="module")
def two_ranks(results: dict[int, Any]) -> list[dict[str, Any]]:
    return results[2]


def judge(name: str, result: dict[str, Any]) -> None:
    """No error, numbers, and no wait but those that are listed."""
    assert not result["error"], result["error"]
    assert all(math.isfinite(loss) for loss in result["losses"])
    waits = [f"{where}: {kind} {operation}, {count} times" for kind, operation, where, count in result["notes"]]
    allowed = tuple(place for start, place, _ in WAITS if name.startswith(start))
    assert not [wait for wait in waits if not wait.startswith(allowed)]


NAMES = [one["name"] for one in cases.one_process("", plugins()) if "does" not in one]


@pytest.mark.parametrize("name", marked(NAMES, EXTENDED))
def test_one_process(one_process: dict[str, Any], name: str) -> None:
    judge(name, one_process[name])


def test_a_read_is_seen(one_process: dict[str, Any]) -> None:
    (note,) = one_process["a plugin that reads"]["notes"]
    assert [*note[:2], note[3]] == ["sync", "aten::_local_scalar_dense", 2]  # in steps 2 and 3 of 4


def test_batches_may_come_from_the_device(one_process: dict[str, Any]) -> None:
    assert not one_process["batches from the device"]["error"]


def test_a_mix_of_devices_is_an_error_with_its_line(one_process: dict[str, Any]) -> None:
    error = one_process["a plugin that mixes devices"]["error"]
    assert "Expected all tensors to be on the same device" in error
    assert "in on_gradients\n    torch.ones(2) + update.grad_norm.expand(2)" in error


def test_every_plugin_is_trained_or_left_out_for_a_reason() -> None:
    tried = {name for one in cases.one_process("", plugins()) for name in one.get("plugins", ())}
    assert plugins().keys() - tried - cases.LEFT_OUT.keys() == set()
    assert cases.LEFT_OUT.keys() <= plugins().keys()


def test_ids_on_the_host_are_taken_for_those_of_the_device_until_either_changes() -> None:
    def copied() -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.arange(3)
        moved = host.clone()
        remember_host(moved, host)
        return moved, host

    moved, host = copied()
    assert on_host(moved) is host
    moved[0] = 1
    assert on_host(moved) is moved
    moved, host = copied()
    host[0] = 1
    assert on_host(moved) is moved
    with torch.inference_mode():
        moved, host = copied()
        assert on_host(moved) is moved


def test_two_ranks(two_ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(two_ranks):
        assert [*results] == [one["name"] for one in cases.TWO_RANKS], f"rank {rank}"
        for name, result in results.items():
            judge(name, result)
        late = [one for one in results["a rank that the others wait for"]["warned"] if "wait for it" in one]
        assert [one.partition(" works in ")[0] for one in late] == ["rank 1"]

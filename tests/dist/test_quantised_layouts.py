"""State in 8 and 4 bits on several ranks: quantised as on one process, as near to fp32, and resumed to the bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import compositions
from crossed import few
from forge_train_tools.testing import Pool, Verifier
from test_matrix_optimizers import alone, resumed, same_bits, saved, train
from test_narrow_layouts import FP32, distance

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]
WIDE = {"decoder.layers": 1, "decoder.dim": 80, "decoder.head_dim": 40, "decoder.hidden": 132}
WIDE.update({"decoder.heads": 2, "decoder.kv_heads": 2})
"""Rows of one and of two blocks, all of which tensor parallelism cuts; three ranks have rows in unequal numbers."""
EXPERTS = {"decoder.layers": 1, "decoder.dim": 64, "moe.experts": 4, "moe.hidden": 48, "moe.balance": 0}
LAYOUTS: Mapping[str, tuple[int, tuple[str, ...], Mapping[str, Any]]] = {
    "fsdp2 uneven": (3, ("fsdp2",), WIDE),
    "hsdp": (4, ("fsdp2",), {**WIDE, "parallel.dp_replicate": 2}),
    "tp × dp": (4, ("tp", "fsdp2"), {**WIDE, "parallel.tp": 2}),
    "ep × dp": (4, ("moe", "ep", "fsdp2"), {**EXPERTS, "parallel.ep": 2}),
}
PAIRS = [
    ("adamw", "8bit", "fsdp2 uneven"),
    ("adamw", "4bit", "tp × dp"),
    ("lion", "8bit", "ep × dp"),
    ("schedule_free", "4bit", "hsdp"),
]
RATES = {**FP32, "muon": {"muon.dtype": "fp32", "muon.lr": 0.01, "muon.adamw.lr": 0.01}}


def state(optimizer: str, dtype: str) -> dict[str, str]:
    moments = {"lion": ("first",), "schedule_free": ("second",)}.get(optimizer, ("first", "second"))
    return {f"{optimizer}.state.{moment}": dtype for moment in moments}


@pytest.mark.parametrize(("optimizer", "dtype", "layout"), few(PAIRS, [one for one in PAIRS if one[1] == "4bit"]))
def test_it_ends_where_one_process_does(
    ranks: Pool, tmp_path: Path, ends: Callable[..., dict[str, Any]], optimizer: str, dtype: str, layout: str
) -> None:
    """One process quantises too: all that parts them are elements whose rounding another last bit decides."""
    world, plugins, config = LAYOUTS[layout]
    many = ((optimizer, *plugins), {**config, **RATES[optimizer], **state(optimizer, dtype)})
    train(ranks, tmp_path, world, *many)
    one, other = ends(*alone(*many)), saved(tmp_path)
    assert distance(other, one) <= (2e-3 if optimizer == "lion" else 1e-3)
    assert one["state"].keys() == other["state"].keys()
    assert any(name.endswith(f"_{dtype}") for name in one["state"])
    for name, right in one["state"].items():
        found = other["state"][name]
        assert (found.dtype, found.shape) == (right.dtype, right.shape)
        if right.dtype == torch.uint8:
            assert float((found == right).float().mean()) >= 0.95, name


@pytest.mark.parametrize(
    ("kept", "layout"),
    few(
        [("8bit", "tp × dp"), ("4bit", "ep × dp"), ("bf16 throughout", "fsdp2 uneven")],
        [("bf16 throughout", "fsdp2 uneven")],
    ),
)
def test_muon_is_as_near_to_fp32_as_on_one_process(
    ranks: Pool, tmp_path: Path, ends: Callable[..., dict[str, Any]], kept: str, layout: str
) -> None:
    """One element that another last bit rounds the other way changes all of its matrix: an orthogonal update follows
    from small singular values as much as from large ones. In fewer bits this is no more than rounding does anyway."""
    world, plugins, config = LAYOUTS[layout]
    exact = (("muon", *plugins), {**config, **RATES["muon"]})
    dtype, *throughout = kept.split()
    many = (exact[0], {**exact[1], **state("muon", dtype)})
    if throughout:
        many = ((*many[0], "bf16_parameters"), {**many[1], "train.precision": "bf16", "muon.state.masters": False})
    train(ranks, tmp_path, world, *many)
    right, one, other = ends(*alone(*exact)), ends(*alone(*many)), saved(tmp_path)
    assert one["state"].keys() == other["state"].keys()
    assert 0 < distance(other, right) <= 1.5 * distance(one, right)
    assert distance(other, one) <= 1.5 * distance(one, right)


@pytest.mark.parametrize(("optimizer", "dtype"), few([("adamw", "4bit"), ("muon", "8bit")], [("muon", "8bit")]))
def test_resumed_it_repeats_to_the_bit_and_goes_on_elsewhere(
    ranks: Pool, tmp_path: Path, optimizer: str, dtype: str
) -> None:
    world, plugins, config = LAYOUTS["fsdp2 uneven"]
    plugins, config = (optimizer, *plugins), {**config, **RATES[optimizer], **state(optimizer, dtype)}
    config = {**config, "checkpoint.every": 2}
    here = {"steps": 4, "folder": tmp_path}
    resumed(ranks, world, plugins, config, name="whole", **here)
    resumed(ranks, world, plugins, config, name="stopped", stop_at=2, **here)
    shutil.copytree(tmp_path / "stopped", tmp_path / "moved")
    resumed(ranks, world, plugins, config, name="stopped", **here)
    assert same_bits(saved(tmp_path, "stopped"), saved(tmp_path, "whole"))
    resumed(ranks, 4, (optimizer, "tp", "fsdp2"), {**config, "parallel.tp": 2}, name="moved", **here)
    if optimizer == "adamw":
        resumed(ranks, 1, (optimizer,), config, name="alone", stop_at=2, **here)
        resumed(ranks, world, plugins, config, name="alone", **here)
    whole = saved(tmp_path, "whole")
    for name in ("moved", "alone")[: 2 if optimizer == "adamw" else 1]:
        there = saved(tmp_path, name)
        assert {key: tensor.shape for key, tensor in there["state"].items()} == {
            key: tensor.shape for key, tensor in whole["state"].items()
        }
        assert distance(there, whole) <= 1e-3


def test_a_shard_is_quantised_as_the_whole_is(ranks: Pool) -> None:
    for reply in ranks.run("narrow_cases:quantised_alike", 4, timeout=100):
        assert len(reply) == 32
        assert all(reply.values()), [name for name, alike in reply.items() if not alike]


@pytest.mark.parametrize(
    ("optimizer", "dtype", "plugin", "layout"),
    [("adamw", "4bit", "fsdp2", {}), ("adamw", "8bit", "tp", {"parallel.tp": 2}), ("muon", "8bit", "fsdp2", {})],
)
def test_verify_agrees(
    verify: Verifier, composition_file: Path, optimizer: str, dtype: str, plugin: str, layout: Mapping[str, int]
) -> None:
    """Given the gradients of the layout, one process comes to the same codes."""
    settings = {**WIDE, **layout, **RATES[optimizer], **state(optimizer, dtype), "cosine.warmup": 0}
    request = compositions._request(composition_file, (optimizer, plugin), settings)
    verdict = verify(request, 2, steps=3)
    print(verdict, verdict.advice)
    assert not verdict.failed, verdict

"""FLOPs of items: what fusions declare against what torch counts, and what `mfu` makes of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import scans
import tiny_models
from forge_train import Batch, Job, Model, Plugin, StepResult, hookimpl
from forge_train_kit.modalities import extras_of, flops_of, flops_of_items
from forge_train_plugins.fusions._cross_attention.ranges import with_ranges
from forge_train_plugins.observers import mfu
from forge_train_tools import bench
from forge_train_tools.configuration.request import Request
from forge_train_tools.testing import run_forge

VALUES, GRIDS, PLACES = extras_of("scan")


def test_layers_of_items_cost_what_torch_counts() -> None:
    """Of a row in which every token sees every vector; else the kernel computes more than is needed."""
    _, model = tiny_models.composed("cross_attention.layers=[1]", plugins=("scans:Scans", "cross_attention"))
    fusion: Any = model.parts[0].fusion
    places = torch.full((2, 24), -1)
    places[:, 0] = 0
    extras = {VALUES: torch.ones(2, 4, 3), GRIDS: torch.tensor([[[1, 1, 4]]] * 2), PLACES: places}
    encoder = fusion.items.encoders["scan"]
    with torch.no_grad():
        features = fusion.features(**extras)
        with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
            fusion.layers["1"](torch.ones(2, 24, 32), **features)
    of_layers = flops_of_items(model.parts[0], extras) - 2 * 3 * flops_of(encoder, (1, 1, 4))
    assert of_layers + fusion.flops_per_token(24) * 48 == 3 * counted.get_total_flops()


@pytest.mark.parametrize("attend", ["all", "last", "run"])
def test_tokens_attend_to_the_items_of_their_document(attend: str) -> None:
    values = ["cross_attention.layers=[1]", f"cross_attention.attend={attend}"]
    _, model = tiny_models.composed(*values, plugins=("scans:Scans", "cross_attention"))
    fusion: Any = model.parts[0].fusion
    ids = torch.randint(20, 60, (4, 24), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = torch.tensor([43, 40, 42, 41])
    cuts = torch.tensor([4, 9, 3, 12])[:, None]
    batch = scans.with_scans(Batch(ids, ids, document_ids=(torch.arange(24) >= cuts).long()), one_token=True)
    extras = with_ranges(batch, ["scan"], attend).extras
    read = fusion.features(**extras)
    seen = (read["mask"][:, 0] == 0) & read["sees"][..., None]
    assert fusion.items.seen(**extras) == (int(extras[GRIDS].prod(-1).sum()), int(seen.sum()))


def test_an_encoder_that_declares_nothing_uses_its_weights_once_a_patch() -> None:
    _, model = tiny_models.composed(plugins=("scans:Scans",))
    fusion: Any = model.parts[0].fusion
    encoder = fusion.enter.encoders["scan"]
    weights = sum(one.numel() for one in encoder.parameters() if one.ndim > 1)
    assert flops_of(encoder, (2, 1, 3)) == 2 * weights * 6
    grids = torch.tensor([[[1, 1, 4], [0, 0, 0]], [[1, 1, 2], [1, 1, 1]]])
    assert flops_of_items(model.parts[0], {GRIDS: grids}) == 3 * 2 * weights * 7
    assert flops_of_items(model.parts[0], {}) == 0


def test_a_frozen_encoder_has_no_backward_pass() -> None:
    _, model = tiny_models.composed(plugins=("scans:Scans",))
    fusion: Any = model.parts[0].fusion
    encoder, extras = fusion.enter.encoders["scan"], {GRIDS: torch.tensor([[[1, 1, 4], [0, 0, 0]]])}
    encoder.layers.requires_grad_(False)
    trained = flops_of_items(model.parts[0], extras)
    encoder.requires_grad_(False)
    assert flops_of_items(model.parts[0], extras) == flops_of(encoder, (1, 1, 4)) == trained / 3


class Seen(Plugin):
    """Adds up what the items of training steps cost."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        self.job, self.model, self.found = job, model, list[int]()

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self.found.append(sum(flops_of_items(self.model.parts[0], one.extras) for one in self.job.step.batches))


@pytest.mark.parametrize("fusion", ["prefix", "cross_attention"])
def test_mfu_counts_items_of_training(fusion: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mfu.time, "perf_counter", lambda: 0.0)
    config = {"cross_attention.every": 1} if fusion == "cross_attention" else {}
    config |= {"log.peak_tflops": 1.0, "log.every": 2, "train.evaluate_every": 1}
    run = run_forge(("scans:Scans", fusion, "mfu", Seen), config, steps=4, folder=tmp_path)
    found, of_token = run.plugin("seen").found, run.model.flops_per_token(32)
    assert max(found) > 0
    for line, of_items in zip(run.metrics, (found[0] + found[1], found[2] + found[3]), strict=True):
        flops = 2 * 4 * 32 * of_token + of_items
        assert line["mfu"] == pytest.approx(flops / 1e12 / 1e-9), "in no time, which counts as a nanosecond"


@pytest.mark.slow
@pytest.mark.parametrize("fusion", [pytest.param("prefix", marks=pytest.mark.extended), "cross_attention"])
def test_bench_counts_items_of_its_batches(fusion: str) -> None:
    small = ("decoder.dim=16", "decoder.layers=4", "train.global_batch=2", "train.sequence=32", "run.device=cpu")
    request = Request(config="quickstart", plugins=("scans:Scans", fusion), set=small)
    found = bench.measure(request, turns=1).flops_per_token
    text = bench.measure(dataclasses.replace(request, plugins=()), turns=1).flops_per_token
    assert found is not None
    assert text is not None
    assert found > text + 1

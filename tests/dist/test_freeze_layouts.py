"""`freeze` on several ranks: loss and gradients equal those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import marked
from forge_train_tools.testing import Pool, Verifier, run_forge

pytestmark = [pytest.mark.dist]

FREEZE = {"freeze.parameters": ["embedding.*", "layers.0.*"], "freeze.but": ["layers.0.*norm*"]}
BATCH = {"train.global_batch": 4, "train.micro_batch": 2}
LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "fsdp2×2, ac": (2, ("fsdp2", "ac"), {}),
    "ddp": (2, ("ddp",), {}),
    "zero1": (2, ("zero1",), {}),
    "tp2": (2, ("tp",), {"parallel.tp": 2}),
    "pp2, a stage without anything to train": (
        2,
        ("pp",),
        {"parallel.pp": 2, "freeze.but": [], "train.micro_batch": 1},
    ),
    "pp2, tied, by the name of the copy": (
        2,
        ("pp",),
        {
            "parallel.pp": 2,
            "train.micro_batch": 1,
            "decoder.tied": True,
            "freeze.parameters": ["head.*"],
            "freeze.but": [],
        },
    ),
}


@pytest.mark.parametrize("layout", marked(LAYOUTS, ["ddp", "zero1"]))
def test_a_layout_agrees_with_one_process(layout: str, verify: Verifier, composition_file: Path) -> None:
    world, plugins, settings = LAYOUTS[layout]
    settings = BATCH | FREEZE | settings
    request = compositions._request(composition_file, (*plugins, "freeze"), settings)
    own = {key: value for key, value in settings.items() if key.startswith(("freeze.", "train.global", "decoder."))}
    reference = compositions._request(composition_file, ("freeze",), {**own, "train.micro_batch": 4})
    verdict = verify(request, world, steps=2, reference=reference)
    assert verdict.agree, verdict


THAW = {
    "freeze.parameters": ["embedding.*", "layers.*"],
    "freeze.thaw": '[{match = "layers.0.*", steps = 1}, {match = "embedding.*", steps = 2}]',
}
THAWED: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "fsdp2×2, ac": (2, ("fsdp2", "ac"), {}),
    "fsdp2×2, compiled": (2, ("fsdp2", "compile"), {}),
    "ddp": (2, ("ddp",), {}),
    "zero1, muon": (2, ("zero1", "muon"), {}),
    "tp2": (2, ("tp",), {"parallel.tp": 2}),
    "pp2": (2, ("pp",), {"parallel.pp": 2, "train.micro_batch": 1}),
    "pp2, tied, weights last": (
        2,
        ("pp",),
        {"parallel.pp": 2, "train.micro_batch": 1, "decoder.tied": True, "pp.schedule": "zbv"},
    ),
    "ep2": (2, ("moe", "ep"), {"parallel.ep": 2}),
    "cp2": (2, ("cp", "fsdp2"), {"parallel.cp": 2}),
}


@pytest.mark.parametrize("layout", marked(THAWED, ["fsdp2×2, compiled", "tp2", "pp2", "cp2"]))
def test_so_does_one_that_thaws(layout: str, verify: Verifier, composition_file: Path) -> None:
    """The second step is the first with another part of the model, and is taken again from a checkpoint; so is the
    third. On a pipeline, the first stage has nothing to train in the first step."""
    world, plugins, settings = THAWED[layout]
    settings = BATCH | THAW | settings
    request = compositions._request(composition_file, (*plugins, "freeze"), settings)
    own = {key: value for key, value in settings.items() if not key.startswith(("parallel.", "pp.", "fsdp2."))}
    kept = [name for name in plugins if name in ("moe", "muon")]
    reference = compositions._request(composition_file, (*kept, "freeze"), {**own, "train.micro_batch": 4})
    verdict = verify(request, world, steps=3, reference=reference)
    assert verdict.agree, verdict


def test_groups_that_were_frozen_reduce_gradients_in_the_dtype_of_the_others(ranks: Pool, tmp_path: Path) -> None:
    """FSDP2 notes it in the first step: in bf16, gradients then came in another dtype than the weights have. Stopped
    at the thaw, the run goes on with one process."""
    thaw = [{"match": "layers.*", "steps": 2}]
    config = {"train.precision": "bf16", "freeze.parameters": ["layers.*"], "freeze.thaw": thaw}
    plugins, own = ["fsdp2", "freeze"], {"train.global_batch": 4, "train.micro_batch": 1}
    arguments: dict[str, Any] = {"plugins": plugins, "config": config | own, "steps": 5, "name": "run"}
    alone = run_forge(("freeze",), {**config, **own}, steps=5, folder=tmp_path / "alone")
    first, _ = ranks.run("cases:train", 2, folder=str(tmp_path), **arguments, stop_at=1)
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir(), "one step later, when all ranks agree"
    more = {**config, **own, "checkpoint.allow_changes": ["probe"]}
    rest = run_forge(("freeze",), more, steps=5, folder=tmp_path, name="run")
    assert [*first["losses"], *rest.losses[2:]] == pytest.approx(alone.losses, rel=1e-3)
    whole, _ = ranks.run("cases:train", 2, folder=str(tmp_path / "whole"), **arguments)
    assert whole["losses"] == pytest.approx(alone.losses, rel=1e-3)
    assert whole["norms"] == pytest.approx([line["grad_norm"] for line in alone.metrics], rel=1e-2)

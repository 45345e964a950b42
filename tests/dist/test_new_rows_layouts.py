"""`new_rows` on several ranks: what one process computes, and other rows as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import compositions
from crossed import marked
from forge_train import ConfigError, Model, Plugin, hookimpl
from forge_train_tools.testing import RunForge, Verifier

IDS = [32, 101, 200]
"""On both ranks of a layout that splits rows."""
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fsdp2×2, ac": (("fsdp2", "ac"), {}),
    "ddp": (("ddp",), {}),
    "tp2": (("tp",), {"parallel.tp": 2}),
    "pp2, tied": (("pp",), {"parallel.pp": 2, "decoder.tied": True, "train.micro_batch": 1}),
}


class Begun(Plugin):
    """Keeps the weights that a run begins with."""

    api = (1, 0)

    @hookimpl
    def on_start(self, model: Model) -> None:
        self.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.dist
@pytest.mark.parametrize("layout", marked(LAYOUTS, ["ddp"]))
def test_a_layout_agrees_with_one_process(layout: str, verify: Verifier, composition_file: Path) -> None:
    plugins, settings = LAYOUTS[layout]
    own = {"new_rows.ids": IDS, "train.global_batch": 4, "adamw.decay_embeddings": True}
    own |= {key: value for key, value in settings.items() if key.startswith("decoder.")}
    request = compositions._request(composition_file, (*plugins, "new_rows"), {"train.micro_batch": 2} | own | settings)
    reference = compositions._request(composition_file, ("new_rows",), {**own, "train.micro_batch": 4})
    verdict = verify(request, 2, steps=2, reference=reference)
    assert verdict.agree, verdict


@pytest.mark.unit
@pytest.mark.parametrize("plugins", [(), ("muon",), ("freeze",)])
def test_other_rows_stay_as_they_are(run_forge: RunForge, plugins: tuple[str, ...]) -> None:
    """Weights to the bit, although they decay, and moments at zero; `freeze` says what else is trained."""
    config: dict[str, Any] = {"new_rows.ids": IDS}
    if "muon" not in plugins:
        config |= {"adamw.weight_decay": 0.5, "adamw.decay_embeddings": True, "adamw.lr": 0.01}
    if "freeze" in plugins:
        config |= {"freeze.parameters": ["layers.0.*"]}
    run = run_forge(("new_rows", *plugins, Begun), config, steps=3)
    begun, ended = run.plugin("begun").weights, {name: p.detach() for name, p in run.model.named_parameters()}
    others = torch.ones(len(ended["head.weight"]), dtype=torch.bool)
    others[IDS] = False
    for name, one in run.model.named_parameters():
        if name in ("embedding.weight", "head.weight"):
            moments = [m for m in run.optimizer.state[one].values() if m.dim()]
            assert moments
            assert all(m[others].eq(0).all() and m[IDS].ne(0).any() for m in moments)
            assert torch.equal(begun[name][others], ended[name][others])
            assert not torch.equal(begun[name][IDS], ended[name][IDS])
        else:
            assert one.requires_grad is ("freeze" in plugins and not name.startswith("layers.0."))


@pytest.mark.unit
def test_gradients_that_are_gone_are_an_error(run_forge: RunForge) -> None:
    config = {"new_rows.ids": IDS, "train.clip_norm": 0.0, "train.micro_batch": 0}
    with pytest.raises(ConfigError, match="the gradients are gone before those of other rows can be left out"):
        run_forge(("new_rows", "optimizer_in_backward"), config)


@pytest.mark.unit
def test_a_row_that_does_not_exist_is_told_with_those_that_do(run_forge: RunForge) -> None:
    with pytest.raises(ConfigError, match=r"new_rows\.ids: the vocabulary has no token 500; its ids are 0 to 256\."):
        run_forge(("new_rows",), {"new_rows.ids": [3, 500]})

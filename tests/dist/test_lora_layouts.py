"""`lora` on several ranks: loss and gradients equal those of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import compositions
import hf_models
from crossed import few, marked
from forge_train.engine import train
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.adapters import export_adapter
from forge_train_tools.testing import Pool, Verifier
from hf_layouts import Foreign

pytestmark = [pytest.mark.dist]

LORA: dict[str, Any] = {
    "lora.modules": ["*"],  # the embedding and the head too
    "lora.tune": ["*norm"],
    "lora.rank": 4,
    "lora.dropout": 0.2,
    "lora.groups": '[{match = "*.v", rank = 2, alpha = 8.0}]',
    "lora.lr_ratio": 4.0,
    "train.init_missing": [],  # of random weights, and no checkpoints
    "checkpoint.only": [],
    "train.global_batch": 4,
    "train.micro_batch": 2,
}
ONE = {"train.micro_batch": 1}
LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "fsdp2×2, ac": (2, ("fsdp2", "ac"), ONE),
    "ddp": (2, ("ddp",), {}),
    "zero1": (2, ("zero1",), {}),
    "tp2": (2, ("tp",), {"parallel.tp": 2}),
    "tp2, not along the sequence, ac": (2, ("tp", "ac"), {"parallel.tp": 2, "tp.sequence_parallel": False}),
    "pp2, ac": (2, ("pp", "ac"), {"parallel.pp": 2, **ONE}),
    "cp2": (2, ("cp", "fsdp2"), {"parallel.cp": 2}),
}


@pytest.mark.parametrize("layout", marked(LAYOUTS, LAYOUTS.keys() - {"fsdp2×2, ac", "tp2, not along the sequence, ac"}))
def test_a_decoder_agrees_with_one_process(layout: str, verify: Verifier, composition_file: Path) -> None:
    world, plugins, settings = LAYOUTS[layout]
    request = compositions._request(composition_file, (*plugins, "lora"), LORA | settings)
    reference = compositions._request(composition_file, ("lora",), {**LORA, "train.micro_batch": 4})
    verdict = verify(request, world, steps=2, reference=reference)
    assert verdict.agree, verdict


@pytest.mark.parametrize("layout", marked(LAYOUTS, LAYOUTS.keys() - {"tp2"}))
def test_so_does_one_whose_rows_have_magnitudes(layout: str, verify: Verifier, composition_file: Path) -> None:
    """A row that tensor parallelism splits has one length."""
    world, plugins, settings = LAYOUTS[layout]
    own = {**LORA, "lora.dora": True, "lora.modules": ["*.attention.*", "*.down", "head"]}
    request = compositions._request(composition_file, (*plugins, "lora"), own | settings)
    reference = compositions._request(composition_file, ("lora",), {**own, "train.micro_batch": 4})
    verdict = verify(request, world, steps=2, reference=reference)
    assert verdict.agree, verdict


@pytest.mark.parametrize("layout", marked(LAYOUTS, LAYOUTS.keys() - {"fsdp2×2, ac"}))
def test_so_does_one_that_begins_as_singular_directions(layout: str, verify: Verifier, composition_file: Path) -> None:
    """Each rank finds those of the whole weight."""
    world, plugins, settings = LAYOUTS[layout]
    own = {**LORA, "lora.start": "pissa", "lora.modules": ["*.attention.*", "*.down", "head"]}
    request = compositions._request(composition_file, (*plugins, "lora"), own | settings)
    reference = compositions._request(composition_file, ("lora",), {**own, "train.micro_batch": 4})
    verdict = verify(request, world, steps=2, reference=reference)
    assert verdict.agree, verdict


@pytest.mark.parametrize(("plugin", "settings"), [("ddp", {}), ("tp", {"parallel.tp": 2})])
def test_ranks_with_whole_factors_take_those_of_the_first(
    plugin: str, settings: dict[str, Any], ranks: Pool, tmp_path: Path
) -> None:
    """Singular vectors may have either sign, and each rank finds its own."""
    config = {"lora.start": "pissa", "lora.rank": 4, "train.init_missing": [], "checkpoint.only": [], **settings}
    first, second = ranks.run(
        "pissa_cases:begun", 2, timeout=200, folder=str(tmp_path), plugins=[plugin], config=config
    )
    assert {name.split("lora_")[1] for name in first} == {"A_start", "B_start"}
    assert first == second


@pytest.fixture(scope="module")
def adapter(composition_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Updates, and modules in full, after a step."""
    folder = tmp_path_factory.mktemp("adapter")
    own = {"lora.modules": ["*.q", "*.down"], "lora.tune": ["*norm", "embedding", "head"], "lora.groups": []}
    more = {"train.steps": 1, "adamw.lr": 0.1, "run.device": "cpu", "train.evaluate_every": 0, **own}
    request = compositions._request(composition_file, ("lora",), LORA | more)
    export_adapter(train(resolve(request), run_dir=folder / "runs").run, folder / "adapter")
    return folder / "adapter"


@pytest.mark.parametrize("layout", marked(LAYOUTS, LAYOUTS.keys() - {"fsdp2×2, ac"}))
def test_so_does_one_with_modules_that_a_folder_has_in_full(
    layout: str, verify: Verifier, composition_file: Path, adapter: Path
) -> None:
    world, plugins, settings = LAYOUTS[layout]
    common = {key: value for key, value in LORA.items() if not key.startswith("lora.")}
    own = {**common, "lora.adapter": str(adapter)}
    request = compositions._request(composition_file, (*plugins, "lora"), own | settings)
    reference = compositions._request(composition_file, ("lora",), {**own, "train.micro_batch": 4})
    verdict = verify(request, world, steps=2, reference=reference)
    assert verdict.agree, verdict


@pytest.mark.parametrize("layout", marked(["tp2", "tp2, whole sequences"], ["tp2, whole sequences"]))
def test_so_does_one_with_magnitudes_and_biases(verify: Verifier, tmp_path: Path, layout: str) -> None:
    """A bias is added after a row's length is changed, and once although ranks have parts of the sum before it."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("phi", **hf_models.MODELS["phi"])
    )
    for name, one in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(one)
    model.save_pretrained(tmp_path / "phi")
    case = Foreign("phi", layout)

    def adapted(request: Request) -> Request:
        own = ("lora.rank=2", "lora.dora=true", "train.init_missing=[]", "checkpoint.only=[]")
        own += (f"hf.weights={tmp_path / 'phi'}",)
        return replace(request, plugins=(*request.plugins, "lora"), set=(*request.set, *own))

    verdict = verify(adapted(case.request()), case.world, steps=2, reference=adapted(case.reference()))
    assert verdict.agree, verdict


@pytest.mark.parametrize(
    ("kind", "layout"),
    few(
        [
            ("cohere", "tp2"),
            ("glm", "dp2, ac, compile"),
            ("arcee", "pp2"),
            ("olmoe", "ep2"),
            ("olmoe", "ep2×tp2"),
            ("glm4_moe", "ep2, zero1, ac"),
        ],
        [("cohere", "tp2"), ("arcee", "pp2"), ("olmoe", "ep2")],
    ),
)
def test_a_class_of_transformers_agrees_with_one_process(verify: Verifier, kind: str, layout: str) -> None:
    pytest.importorskip("transformers")
    case = Foreign(kind, layout)

    def adapted(request: Request) -> Request:
        own = ("lora.rank=2", "train.init_missing=[]", "checkpoint.only=[]")
        return replace(request, plugins=(*request.plugins, "lora"), set=(*request.set, *own))

    verdict = verify(adapted(case.request()), case.world, steps=2, reference=adapted(case.reference()))
    assert verdict.agree, verdict

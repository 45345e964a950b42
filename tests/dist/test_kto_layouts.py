"""KTO: layouts against one process in losses, gradients, metrics (z0 among them) and evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import compositions
import forge_cli
import heads_data
from crossed import marked
from forge_train_tools.configuration.request import Request
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

Settings = Mapping[str, Any]
LOSS: Settings = {"kto.beta": 0.5, "kto.desirable_weight": 0.8, "kto.undesirable_weight": 1.1, "kto.chunk": 96}
CASES: dict[str, tuple[int, tuple[str, ...], Settings]] = {
    "fsdp2, 2×2": (4, ("fsdp2",), {"parallel.dp_replicate": 2, "train.micro_batch": 2}),
    "ddp2": (2, ("ddp",), {"train.micro_batch": 2}),
    "ddp2, lora": (2, ("ddp", "lora"), {"train.micro_batch": 2}),
    "tp2": (2, ("tp",), {"parallel.tp": 2, "train.micro_batch": 4}),
    "cp2": (2, ("cp", "fsdp2"), {"parallel.cp": 2, "train.micro_batch": 4}),
    "pp2, stored": (2, ("pp",), {"parallel.pp": 2, "train.micro_batch": 4, "kto.stored": "reference.json"}),
}
"""Processes, plugins and settings of the layout. All but one process accumulate gradients, over answers of which some
are short and some are cut; evaluations have padding."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of unlike lengths, a model to compare with, and the configuration that all cases share."""
    folder = tmp_path_factory.mktemp("kto")
    texts = [text for name in heads_data.PACKAGES for text in heads_data.passages(name, 20)]
    records = (
        {"prompt": text[5 : 9 + at % 7], "completion": text[: 4 + at % 60], "label": at % 3 > 0}
        for at, text in enumerate(texts)
    )
    heads_data.write(folder / "feedback.jsonl", records)
    compositions.write_config(
        folder / "kto.toml",
        ("decoder",),
        run={"seed": 3},
        train={"steps": 3, "global_batch": 16, "sequence": 48, "evaluate_every": 2, "evaluate_batches": 2},
        decoder={"layers": 2, "max_sequence": 64, "vocabulary": 320},
        adamw={"lr": 1e-2},
    )
    settings = ("run.seed=5", "train.steps=2", "train.evaluate_every=0", f"text.path={__file__}", "text.held_out=0")
    options = [part for one in settings for part in ("-s", one)]
    done = forge_cli.forge("train", folder / "kto.toml", "--run-dir", folder, "--name", "base", *options)
    assert done.code == 0, done.err
    return folder


def request(data: Path, plugins: tuple[str, ...], **settings: Any) -> Request:
    files = {"path": str(data / "feedback.jsonl"), "cache": str(data / "cache"), "template": "plain", "long": "right"}
    values = {f"text_feedback.{key}": value for key, value in files.items()}
    start = "train.init_from" if "lora" in plugins else "kto.weights"
    values |= {"text_feedback.held_out": 0.1, start: str(data / "base"), **LOSS}
    return compositions._request(data / "kto.toml", ("kto", "text_feedback", *plugins), {**values, **settings})


@pytest.mark.parametrize("case", marked(CASES, ["fsdp2, 2×2", "ddp2", "pp2, stored"]))
def test_agrees_with_one_process(verify: Verifier, data: Path, case: str) -> None:
    world, plugins, layout = CASES[case]
    layout = dict(layout)
    adapters = tuple(one for one in plugins if one == "lora")
    reference = request(data, adapters)
    if stored := layout.pop("kto.stored", ""):  # computed by two ranks that share the vocabulary, used by two stages
        layout["kto.stored"] = str(data / stored)
        values = [*request(data, (), **{"kto.stored": str(data / stored)}).set, "train.steps=1", "parallel.tp=2"]
        options = [part for one in values for part in ("-s", one)]
        run = ("--run-dir", data, "--name", "first", "--nproc", "2")
        done = forge_cli.forge("train", data / "kto.toml", "-p", "kto,text_feedback,tp", *run, *options)
        assert done.code == 0, done.err
    verdict = verify(request(data, plugins, **layout), world, steps=2, reference=reference)
    assert verdict.agree, verdict

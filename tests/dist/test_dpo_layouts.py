"""Preferences, with a reference and without: layouts against one process in losses, gradients, metrics, evaluations."""

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
SIGMOID: Settings = {"dpo.beta": 0.5, "dpo.label_smoothing": 0.1, "dpo.sft_weight": 0.2, "dpo.chunk": 96}
PACKED: Settings = {"text_pairs.packing": "best_fit", "train.sequence": 256, "dpo.chunk": 400}
CASES: dict[str, tuple[int, tuple[str, ...], Settings, Settings]] = {
    "fsdp2, 2×2": (4, ("fsdp2",), {"parallel.dp_replicate": 2, "train.micro_batch": 2}, SIGMOID),
    "ddp2": (2, ("ddp",), {"train.micro_batch": 2}, {**SIGMOID, "dpo.length_normalised": True}),
    "tp2": (2, ("tp",), {"parallel.tp": 2, "train.micro_batch": 4}, SIGMOID),
    "cp2": (2, ("cp", "fsdp2"), {"parallel.cp": 2, "train.micro_batch": 4}, {"dpo.loss": "ipo"}),
    "pp2, stored": (
        2,
        ("pp",),
        {"parallel.pp": 2, "train.micro_batch": 4},
        {**SIGMOID, "dpo.stored": "reference.json"},
    ),
    "tp2, stored": (
        2,
        ("tp",),
        {"parallel.tp": 2, "train.micro_batch": 4},
        {**SIGMOID, "dpo.stored": "computed-by-tp.json"},
    ),
    "pp2, simpo": (2, ("pp",), {"parallel.pp": 2, "train.micro_batch": 4}, {"dpo.loss": "simpo"}),
    "pp2, orpo": (2, ("pp",), {"parallel.pp": 2, "train.micro_batch": 4}, {"dpo.loss": "orpo"}),
    "packed, fsdp2, 2×2": (
        4,
        ("fsdp2",),
        {"parallel.dp_replicate": 2, "train.micro_batch": 1},
        {**SIGMOID, **PACKED, "dpo.length_normalised": True},
    ),
    "packed, tp2": (2, ("tp",), {"parallel.tp": 2, "train.micro_batch": 4}, {**SIGMOID, **PACKED}),
    "packed, cp2": (
        2,
        ("cp", "fsdp2"),
        {"parallel.cp": 2, "train.micro_batch": 4},
        {"dpo.loss": "ipo", **PACKED},
    ),
    "packed, pp2, stored": (
        2,
        ("pp",),
        {"parallel.pp": 2, "train.micro_batch": 4},
        {**SIGMOID, **PACKED, "dpo.stored": "packed.json"},
    ),
}
"""Processes, plugins, settings of the layout, and of the loss. All but one process accumulate gradients, over pairs of
which some are short and some are cut, or in rows of several pairs; evaluations have padding."""


EXTENDED = ("fsdp2, 2×2", "packed, fsdp2, 2×2", "packed, pp2, stored", "tp2", "tp2, stored", "cp2")
"""CI has rows of several pairs where ranks split what a sequence is made of, and a stored reference in a pipeline."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of unlike lengths, a model to compare with, and the configuration that all cases share."""
    folder = tmp_path_factory.mktemp("dpo")
    texts = [text for name in heads_data.PACKAGES for text in heads_data.passages(name, 20)]
    records = (
        {"prompt": "p", "chosen": text[: 4 + at % 60], "rejected": f"{text[5:25]}!"} for at, text in enumerate(texts)
    )
    heads_data.write(folder / "pairs.jsonl", records)
    compositions.write_config(
        folder / "dpo.toml",
        ("decoder",),
        run={"seed": 3},
        train={"steps": 3, "global_batch": 16, "sequence": 48, "evaluate_every": 2, "evaluate_batches": 2},
        decoder={"layers": 2, "max_sequence": 256, "vocabulary": 320},
        adamw={"lr": 1e-2},
    )
    settings = ("run.seed=5", "train.steps=2", "train.evaluate_every=0", f"text.path={__file__}", "text.held_out=0")
    options = [part for one in settings for part in ("-s", one)]
    done = forge_cli.forge("train", folder / "dpo.toml", "--run-dir", folder, "--name", "base", *options)
    assert done.code == 0, done.err
    return folder


def request(data: Path, plugins: tuple[str, ...], **settings: Any) -> Request:
    files = {"path": str(data / "pairs.jsonl"), "cache": str(data / "cache"), "template": "plain", "long": "right"}
    values = {f"text_pairs.{key}": value for key, value in files.items()}
    compares = settings.get("dpo.loss") not in ("simpo", "orpo")
    values |= {"text_pairs.held_out": 0.1, **({"dpo.weights": str(data / "base")} if compares else {})}
    return compositions._request(data / "dpo.toml", ("dpo", "text_pairs", *plugins), {**values, **settings})


@pytest.mark.parametrize("case", marked(CASES, EXTENDED))
def test_agrees_with_one_process(verify: Verifier, data: Path, case: str) -> None:
    world, plugins, layout, loss = CASES[case]
    loss = dict(loss)
    stored = {"dpo.stored": str(data / loss.pop("dpo.stored"))} if "dpo.stored" in loss else {}
    reference = request(data, (), **loss)
    if (
        stored and "pp" in plugins
    ):  # computed by two ranks that share the pairs, and looked up by two that share the layers
        values = [*request(data, (), **loss, **stored).set, "train.steps=1", "train.micro_batch=2"]
        options = [part for one in values for part in ("-s", one)]
        run = ("--run-dir", data, "--name", Path(stored["dpo.stored"]).stem, "--nproc", "2")
        done = forge_cli.forge("train", data / "dpo.toml", "-p", "dpo,text_pairs,fsdp2", *run, *options)
        assert done.code == 0, done.err
    verdict = verify(request(data, plugins, **layout, **loss, **stored), world, steps=2, reference=reference)
    assert verdict.agree, verdict

"""A student of a frozen teacher: layouts against one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import forge_cli
from compositions import Composition
from crossed import few, marked
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

TIED, UNTIED = ("no ac", "three", "tied", "packed"), ("full", "one", "untied", "one text")


@pytest.fixture(scope="module")
def teacher(composition_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model that is deeper than the student's, and has learned something."""
    folder, model = tmp_path_factory.mktemp("teacher"), ("decoder.layers=3", "adamw.lr=1e-2")
    settings = (*model, "train.steps=12", "train.micro_batch=36")
    options = [part for one in settings for part in ("-s", one)]
    done = forge_cli.forge("train", composition_file, "--run-dir", folder, "--name", "teacher", *options)
    assert done.code == 0, done.err
    return folder / "teacher"


@pytest.mark.parametrize(
    ("composition", "layout"),
    [
        (Composition("dp3", *TIED), {}),
        (Composition("ddp2", *UNTIED), {}),
        (Composition("tp2", *UNTIED), {"distill.divergence": "jensen_shannon"}),
        (Composition("tp2", *TIED), {"tp.loss_parallel": False, "tp.sequence_parallel": False}),
        (Composition("ddp2", *TIED), {"distill.divergence": "reverse"}),
        pytest.param(Composition("tp2", *UNTIED), {}, marks=pytest.mark.extended),
        pytest.param(Composition("tp2", *TIED), {"distill.divergence": "reverse"}, marks=pytest.mark.extended),
        pytest.param(Composition("tp2×dp2", *TIED), {}, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_agrees_with_one_process(
    verify: Verifier, composition_file: Path, teacher: Path, composition: Composition, layout: Mapping[str, Any]
) -> None:
    settings = {
        "distill.weights": str(teacher),
        "distill.teacher": "{ decoder = { layers = 3, tied = false } }",
        "distill.temperature": "2.0",
        "distill.chunk": "192",
    }
    request = composition.request(composition_file, ("distill",), **settings, **layout)
    own = {key: value for key, value in layout.items() if key.startswith("distill.")}
    reference = composition.reference(composition_file, ("distill",), **settings, **own)
    verdict = verify(request, composition.world, steps=2, reference=reference)
    assert verdict.agree, verdict


STORED: Mapping[str, tuple[Composition, Mapping[str, Any]]] = {
    "fsdp2, 2×2": (Composition("hsdp2×2", *TIED), {}),
    "tp2": (Composition("tp2", *UNTIED), {"distill.divergence": "jensen_shannon"}),
    "tp2, whole logits": (Composition("tp2", *TIED), {"tp.loss_parallel": False}),
    "cp2": (Composition("dp2", *UNTIED), {"parallel.cp": 2, "train.micro_batch": 12}),
    "pp2": (Composition("dp2", *TIED), {"parallel.pp": 2, "train.micro_batch": 12}),
}
"""All but the pipeline have the teacher fill a folder of their own."""


@pytest.mark.parametrize("case", marked(STORED, ["fsdp2, 2×2", "tp2, whole logits"]))
def test_stored_logits_agree_with_one_process(
    verify: Verifier, composition_file: Path, teacher: Path, tmp_path: Path, case: str
) -> None:
    composition, layout = STORED[case]
    settings = {
        "distill.weights": str(teacher),
        "distill.teacher": "{ decoder = { layers = 3, tied = false } }",
        "distill.temperature": "2.0",
        "distill.chunk": "192",
        "distill.top_k": "5",
        "distill.stored": str(tmp_path / "alone"),
        **{key: value for key, value in layout.items() if key.startswith("distill.")},
    }
    reference = composition.reference(composition_file, ("distill",), **settings)
    plugins, own = {"cp2": ("cp",), "pp2": ("pp",)}.get(case, ()), {"distill.stored": str(tmp_path / "ranks")}
    if case == "pp2":
        options = [part for one in (*reference.set, "train.steps=1") for part in ("-s", one)]
        done = forge_cli.forge("train", composition_file, "-p", "distill", "--run-dir", tmp_path, *options)
        assert done.code == 0, done.err
        own = {}
    request = composition.request(composition_file, ("distill", *plugins), **{**settings, **own, **layout})
    verdict = verify(request, composition.world, steps=2, reference=reference)
    assert verdict.agree, verdict
    if own:
        alone, ranks = (
            {key: row for file in sorted((tmp_path / name).glob("*.safetensors")) for key, row in rows(file)}
            for name in ("alone", "ranks")
        )
        assert alone.keys() == ranks.keys()
        for key, (tokens, values) in alone.items():
            assert (tokens == ranks[key][0]).double().mean() > 0.99  # ties
            torch.testing.assert_close(values, ranks[key][1], rtol=0, atol=0.02)


HIDDEN: Mapping[str, tuple[Composition, Mapping[str, Any]]] = {
    "fsdp2, 2×2, ac": (Composition("hsdp2×2", *UNTIED), {}),
    "tp2, uneven pieces": (Composition("tp2", *TIED), {"train.sequence": 15}),
    "tp2, whole sequences": (Composition("tp2", *UNTIED), {"tp.sequence_parallel": False}),
    "cp2": (Composition("dp2", *UNTIED), {"parallel.cp": 2, "train.micro_batch": 12}),
    "ddp2, compiled": (Composition("ddp2", *TIED), {"compile.backend": "aot_eager"}),
}
PROJECTED = {"distill.hidden_width": 32, "decoder.dim": 16, "decoder.hidden": 24}
"""A student half as wide as its teacher."""


HIDDEN_CASES = [*itertools.product(HIDDEN, ["mse", "cosine"], [PROJECTED, {}])]
HIDDEN_IN_CI = [
    *(("fsdp2, 2×2, ac", "mse", PROJECTED), ("tp2, uneven pieces", "cosine", {})),
    *(("tp2, whole sequences", "mse", PROJECTED), ("cp2", "cosine", {})),
]
"""test_compositions.py compiles."""


@pytest.mark.parametrize(("case", "kind", "student"), few(HIDDEN_CASES, HIDDEN_IN_CI))
def test_hidden_states_agree_with_one_process(
    verify: Verifier, composition_file: Path, teacher: Path, case: str, kind: str, student: Mapping[str, Any]
) -> None:
    composition, layout = HIDDEN[case]
    settings = {
        **student,
        "distill.weights": str(teacher),
        "distill.teacher": "{ decoder = { layers = 3, tied = false, dim = 32, hidden = 48 } }",
        "distill.hidden": [["layers.*", "layers.*"], ["embedding", "embedding"]],
        "distill.hidden_loss": kind,
        "distill.hidden_weight": 5.0,
        **{key: value for key, value in layout.items() if key == "train.sequence"},
    }
    plugins = {"cp2": ("cp",), "ddp2, compiled": ("compile",)}.get(case, ())
    reference = composition.reference(composition_file, ("distill",), **settings)
    request = composition.request(composition_file, ("distill", *plugins), **{**settings, **layout})
    verdict = verify(request, composition.world, steps=2, reference=reference)
    assert verdict.agree, verdict


def rows(file: Path) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield the rows of a part by their keys."""
    held = load_file(file)
    ends = held["ends"].tolist()
    for key, start, end in zip(held["keys"].tolist(), [0, *ends], ends, strict=False):
        yield key, (held["tokens"][start:end], held["log_probabilities"][start:end])

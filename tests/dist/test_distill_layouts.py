"""A student of a frozen teacher: layouts against one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import forge_cli
from compositions import Composition
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]

TIED, UNTIED = ("no ac", "three", "tied", "packed"), ("full", "one", "untied", "one text")


@pytest.fixture(scope="module")
def teacher(composition_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model that is deeper than the student's."""
    folder, settings = tmp_path_factory.mktemp("teacher"), ("decoder.layers=3", "train.steps=3", "train.micro_batch=36")
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
        "distill.chunk": "48",
    }
    request = composition.request(composition_file, ("distill",), **settings, **layout)
    own = {key: value for key, value in layout.items() if key.startswith("distill.")}
    reference = composition.reference(composition_file, ("distill",), **settings, **own)
    verdict = verify(request, composition.world, steps=2, reference=reference)
    assert verdict.agree, verdict

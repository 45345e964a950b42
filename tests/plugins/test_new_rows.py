"""`new_rows`: what a plan counts is what a run holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge_train_tools import plan
from forge_train_tools.testing import run_forge

pytestmark = pytest.mark.unit


def test_tokens_that_the_data_lacks_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A token that is misspelt in the data is never learned, and nothing else would say so."""
    run_forge(("new_rows",), {"new_rows.ids": [1, 32, 101]}, folder=tmp_path / "lacks", steps=2)
    assert "new_rows: these steps read none of the tokens 1 (1 of 3 whose rows are trained)." in caplog.text
    caplog.clear()
    run_forge(("new_rows",), {"new_rows.ids": [32, 101]}, folder=tmp_path / "has", steps=2)
    assert "these steps read none" not in caplog.text


def test_a_plan_counts_what_a_run_holds(tmp_path: Path) -> None:
    """Gradients and moments are those of whole matrices, and what is trained are rows."""
    run = run_forge(("new_rows",), {"new_rows.ids": [1, 5]}, folder=tmp_path, steps=1)
    trained = [one for one in run.model.parameters() if one.requires_grad]
    states = [one for held in run.optimizer.state.values() for one in held.values() if isinstance(one, torch.Tensor)]
    made = plan(run.run / "config.toml")
    assert made.memory.gradients == sum(one.nbytes for one in trained)
    assert made.memory.optimizer == sum(one.nbytes for one in states)
    assert made.parameters.trainable == sum(2 * one.shape[1] for one in trained) < sum(one.numel() for one in trained)

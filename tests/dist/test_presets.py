"""Every preset of several processes trains, on ranks that are there already."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

import preset_settings
from forge_train.engine import train
from forge_train_cli.presets import Preset, everything
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist]

SEVERAL = [one for one in everything() if one.processes > 1 and not one.parameters]


def case(name: str, text: str, folder: str) -> dict[str, Any]:
    """What a rank does."""
    request = Request(config=name, without=("console", "tensorboard"), set=preset_settings.values(Path(text), name))
    setup = resolve(request, world=int(os.environ["WORLD_SIZE"]))
    finished = train(setup, run_dir=Path(folder), resume="never")
    axes = {axis: size for axis, size in setup.config.parallel.__dict__.items() if size > 1}
    return {"outcome": finished.outcome, "step": finished.step, "loss": finished.loss, "axes": axes}


@pytest.mark.parametrize("preset", SEVERAL, ids=lambda preset: preset.name)
def test_a_preset_trains(ranks: Pool, tmp_path: Path, preset: Preset) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("\n".join(f"line {n}: {n * n % 97}" for n in range(400)), encoding="utf-8")
    first, *others = ranks.run(case, preset.processes, name=preset.name, text=str(text), folder=str(tmp_path / "runs"))
    assert (first["outcome"], first["step"]) == ("done", 2)
    assert 4 < first["loss"] < 7
    assert math.prod(size for axis, size in first["axes"].items() if axis != "ep") == preset.processes
    assert all(other["loss"] == first["loss"] for other in others)

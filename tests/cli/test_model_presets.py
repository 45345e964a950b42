"""Presets of published models: their parameters, as Forge and transformers count them, and the hardware they fit on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from forge_command import Forge
from forge_train.plugin import hookspecs
from forge_train_cli.presets import Preset, everything
from forge_train_kit.hf.start import exported
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.opening import lone_job

MODELS = [one for one in everything() if one.parameters]


def _devices(preset: Preset) -> tuple[int, str]:
    count, name = preset.hardware.split()
    return int(count), name


@pytest.mark.parametrize("preset", MODELS, ids=lambda preset: preset.name)
def test_has_the_published_number_of_parameters(preset: Preset, tmp_path: Path) -> None:
    """Counted in Forge's model, and in the one that transformers builds from the `config.json` of its export."""
    setup = resolve(Request(config=preset.name, set=("run.device=cpu",)), world=_devices(preset)[0])
    job = lone_job(setup, tmp_path)
    with torch.device("meta"):
        model = hookspecs.build_model(job)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    further = sum(size for name, size in sizes.items() if name.startswith("tail."))
    assert sum(sizes.values()) - further == preset.parameters
    if preset.name == "deepseek-v3":
        layer = sum(size for name, size in sizes.items() if name.startswith("layers.60."))
        assert further == layer + 2 * 7168**2 + 3 * 7168, (
            "a layer, a projection and three norms (arXiv:2412.19437, §2.2)"
        )
    layout = exported(job)
    assert layout is not None
    config = dict(layout.config)
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(made)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == preset.parameters
    assert type(theirs).__name__ == config["architectures"][0]


def test_fits_on_the_hardware_that_it_names(forge: Forge) -> None:
    """The smallest; `python benchmarks/run.py presets` plans all."""
    preset = min(MODELS, key=lambda one: one.parameters)
    world, device = _devices(preset)
    sizes = ("--world", str(world), "--device", device, "-s", "train.global_batch=2", "-s", "train.micro_batch=1")
    made = forge("plan", preset.name, *sizes, "--json").json
    assert made["parameters"]["total"] == preset.parameters
    assert made["roofline"]["fits"]

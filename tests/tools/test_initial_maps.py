"""A run starts from weights of another model, through a state map: experts, more layers, another vocabulary."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_train import ConfigError
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model
from forge_train_tools.testing import run_forge

pytestmark = [pytest.mark.unit]
MAPS = """
from forge_train_kit.state_map import Renumber, Repeat, Resize

EXPERTS = Repeat("layers.{i}.feed_forward.{m}.weight", "layers.{i}.feed_forward.routed.experts.{m}", 4)
DEEPER = Renumber("layers.{i}.{rest*}", (0, 0, 1, 1))
SHALLOWER = Renumber("layers.{i}.{rest*}", (1,))
TOO_DEEP = Renumber("layers.{i}.{rest*}", (0, 1, 2))
WIDER = Resize(("embedding.weight", "head.weight"), 257, 300, fill="mean")
NARROWER = Resize(("embedding.weight", "head.weight"), 300, 257)
TEXT = "layers"
"""
UNTIED = {"decoder.tied": False, "adamw.lr": 1e-30, "adamw.weight_decay": 0.0}
MOE = {"moe.experts": 4, "moe.top_k": 2, "moe.hidden": 48, "train.init_missing": ["*.router.weight"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, its export, and maps."""
    folder = tmp_path_factory.mktemp("maps")
    run = run_forge((), {"decoder.tied": False, "adamw.lr": 1e-2}, steps=2, folder=folder / "runs")
    run.run.rename(folder / "run")
    export_checkpoint(folder / "run", folder / "hf")
    (folder / "maps.py").write_text(MAPS)
    return folder


def weights(path: Path) -> dict[str, Tensor]:
    return open_model(path, text=False).model.state_dict()


def begin(
    folder: Path, name: str, config: dict[str, Any], *, source: str = "run", plugins: tuple[str, ...] = ()
) -> Any:
    start = {"train.init_from": str(folder / source), "train.init_map": f"{folder}/maps.py:{name}"}
    return run_forge(plugins, {**UNTIED, **start, **config}, steps=1)


@pytest.mark.parametrize("source", ["run", "hf"])
def test_a_dense_model_becomes_experts_that_compute_the_same(folder: Path, source: str) -> None:
    dense = run_forge((), {**UNTIED, "train.init_from": str(folder / "run")}, steps=1)
    moe = begin(folder, "EXPERTS", MOE, source=source, plugins=("moe",))
    assert moe.losses[0] == pytest.approx(dense.losses[0], rel=1e-5)
    found, before = moe.model.state_dict(), weights(folder / "run")
    for part in ("gate", "up", "down"):
        stacked = found[f"layers.1.feed_forward.routed.experts.{part}"]
        assert torch.equal(stacked, before[f"layers.1.feed_forward.{part}.weight"].expand(4, -1, -1))
    with pytest.raises(ConfigError, match=r"layers\.0\.feed_forward\.routed\.router\.weight: missing \(4 × 32\)"):
        begin(folder, "EXPERTS", {**MOE, "train.init_missing": []}, source=source, plugins=("moe",))


@pytest.mark.parametrize("source", ["run", "hf"])
def test_layers_are_copied_or_left_out(folder: Path, source: str) -> None:
    before = weights(folder / "run")
    for name, order in (("DEEPER", (0, 0, 1, 1)), ("SHALLOWER", (1,))):
        found = begin(folder, name, {"decoder.layers": len(order)}, source=source).model.state_dict()
        for new, old in enumerate(order):
            own = f"layers.{new}."
            assert all(
                torch.equal(found[n], before[f"layers.{old}." + n[len(own) :]]) for n in found if n.startswith(own)
            )
        assert torch.equal(found["head.weight"], before["head.weight"])


@pytest.mark.parametrize("source", ["run", "hf"])
def test_a_vocabulary_grows(folder: Path, source: str) -> None:
    before = weights(folder / "run")
    found = begin(folder, "WIDER", {"decoder.vocabulary": 300}, source=source).model.state_dict()
    for name in ("embedding.weight", "head.weight"):
        assert torch.equal(found[name][:257], before[name])
        assert torch.allclose(found[name][257:], before[name].mean(0).expand(43, -1), atol=1e-6)


def test_a_vocabulary_shrinks(folder: Path) -> None:
    wide = run_forge((), {"decoder.tied": False, "decoder.vocabulary": 300}, steps=1, folder=folder / "wide")
    found = begin(folder, "NARROWER", {}, source=str(wide.run)).model.state_dict()
    assert torch.equal(found["embedding.weight"], wide.model.state_dict()["embedding.weight"][:257])


MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no such layer": ("TOO_DEEP", {"decoder.layers": 3}, r"layers\.\{i\}\.\{rest\*\}: no number 2 among 2"),
    "another size": ("WIDER", {}, r"embedding\.weight: 300 × 32 by the map, 257 × 32 in this model"),
    "too few layers": ("DEEPER", {}, r"layers\.2\.attention\.k\.weight: not in this model"),
    "no map": ("TEXT", {}, r"train\.init_map names a str; expected a StateMap"),
    "not there": ("DEPER", {}, r"has no 'DEPER'\. Did you mean 'DEEPER'\?"),
    "a pattern": ("DEEPER", {"decoder.layers": 4, "train.init_missing": ["x"]}, r"'x' fits nothing that .* lacks"),
    "no weights": ("DEEPER", {"train.init_from": ""}, r"train\.init_map: needs a checkpoint"),
    "only": ("DEEPER", {"decoder.layers": 4, "checkpoint.only": ["embedding.*"]}, r"train\.init_map changes them"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("source", ["run", "hf"])
def test_a_map_that_does_not_fit_is_told_how(folder: Path, mistake: str, source: str) -> None:
    name, config, told = MISTAKES[mistake]
    if mistake == "only" and source == "hf":
        told = "in Hugging Face layout"
    with pytest.raises(ConfigError, match=told):
        begin(folder, name, config, source=source)


def test_a_path_begins_where_it_is_written_and_a_module_is_no_path(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    for written, read in (("./maps.py:DEEPER", f"{tmp_path}/maps.py:DEEPER"), ("maps:DEEPER", "maps:DEEPER")):
        file.write_text(f'[train]\nsteps = 1\ninit_from = "{folder}/run"\ninit_map = "{written}"\n')
        assert resolve(Request(config=str(file)), data=False).config.train.init_map == read


def test_a_map_that_came_with_a_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    """The folder of somebody's run, which is only looked at."""
    shutil.copytree(folder / "run", tmp_path / "run")
    (tmp_path / "run" / "maps.py").write_text("raise SystemExit('run')")
    checkpoint = next((tmp_path / "run" / "checkpoints").glob("step-*"))
    for file in (tmp_path / "run" / "config.toml", checkpoint / "config.toml"):
        text = file.read_text()
        assert 'init_map = ""' in text
        file.write_text(text.replace('init_map = ""', 'init_map = "../../maps.py:MAP"'))
    request = Request(config=str(checkpoint / "config.toml"), foreign=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"maps\.py:MAP' came with this folder, and no code of it is run"):
        resolve(request, training=False)

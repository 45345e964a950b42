"""Opening a run to look at its model: with the plugins of then, on one process, without a trace."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tomlkit
import torch

import tiny_models
from forge_cli import forge
from forge_train import ConfigError, ForgeError
from forge_train.checkpoint import checkpoint
from forge_train.engine import train
from forge_train.mesh.layout import Layout
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.opening import Wanted, open_model, setup_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.trained(tmp_path_factory.mktemp("trained"))


@pytest.mark.unit
def test_a_run_opens_without_its_text_its_observers_and_its_world(run: Path, tmp_path: Path) -> None:
    """What only training needs may be gone."""
    moved = tmp_path / "moved"
    shutil.copytree(run / "checkpoints" / "step-00000003", moved)
    config = tomlkit.loads((moved / "config.toml").read_text())
    config["plugins"] = ["tensorboard", "gone_observer"]
    config["defaults"]["slot_of_a_gone_package"] = "gone_default"  # type: ignore[index]
    config["parallel"]["axis_of_a_gone_package"] = 2  # type: ignore[index]
    config["text"]["path"] = "/gone"  # type: ignore[index]
    config["parallel"]["tp"] = 4  # type: ignore[index]
    config["run"]["device"] = "cuda"  # type: ignore[index]
    config["gone_observer"] = {"key": 1}
    config["fsdp2"] = {}  # as a run of several processes leaves it
    (moved / "config.toml").write_text(tomlkit.dumps(config))
    tiny_models.reseal(moved)

    opened = open_model(moved)
    assert opened.step == 3
    assert opened.job.config.parallel.tp == 1
    assert set(opened.job.hooks.enabled) == set(open_model(run).job.hooks.enabled)
    for left, right in zip(opened.model.parameters(), open_model(run).model.parameters(), strict=True):
        assert torch.equal(left, right)


EDITS: dict[str, tuple[str, object]] = {
    "decoder.heads": ("decoder.heads", 8),
    "decoder.kv_heads": ("decoder.kv_heads", 4),
    "decoder.norm_eps": ("decoder.norm_eps", 0.1),
    "decoder.rope.theta": ("decoder.rope", {"theta": 10001.0}),
    "swiglu.activation": ("swiglu.activation", "geglu"),
}


@pytest.mark.unit
@pytest.mark.parametrize("key", EDITS)
def test_a_model_edited_in_a_checkpoints_configuration_is_refused_by_key(run: Path, tmp_path: Path, key: str) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run / "checkpoints" / "step-00000003", moved)
    config = tomlkit.loads((moved / "config.toml").read_text())
    section, name = EDITS[key][0].split(".")
    config.setdefault(section, {})[name] = EDITS[key][1]
    (moved / "config.toml").write_text(tomlkit.dumps(config))
    commands = (("generate", moved, "--tokens", "1"), ("eval", moved), ("checkpoint", "export", moved, tmp_path / "hf"))
    for command in commands:
        ended = forge(*command)
        assert ended.code == 2
        assert f"holds another model than its config.toml describes:\n  {key}: " in ended.err
    assert not (tmp_path / "hf").exists()


@pytest.mark.unit
def test_values_asked_for_and_what_may_change_are_taken(run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run / "checkpoints" / "step-00000003", moved)
    config = tomlkit.loads((moved / "config.toml").read_text())
    config["text"]["path"] = str(shutil.copy(config["text"]["path"], tmp_path / "new.txt"))  # type: ignore[index]
    config["adamw"] = {"lr": 0.5}
    config["defaults"]["slot_of_a_gone_package"] = "gone_default"  # type: ignore[index]
    config["parallel"]["axis_of_a_gone_package"] = 2  # type: ignore[index]
    (moved / "config.toml").write_text(tomlkit.dumps(config))
    assert forge("eval", moved).code == 0
    assert forge("eval", moved, "-s", "decoder.rope.theta=500").code == 0


@pytest.mark.unit
def test_a_plugin_that_is_gone_is_named(run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run / "checkpoints" / "step-00000003", moved)
    for name in ("config.toml", "state.json", "manifest.json"):
        text = (moved / name).read_text().replace('"cosine"', '"cosinf"').replace("[cosine]", "[cosinf]")
        (moved / name).write_text(text)
    tiny_models.reseal(moved)
    with pytest.raises(ConfigError, match=r"there is no plugin named 'cosinf'\. Did you mean 'cosine'"):
        open_model(moved)


@pytest.mark.unit
def test_the_data_takes_what_other_axes_leave_of_several_processes(run: Path) -> None:
    path = checkpoint.resolve(run)
    saved = checkpoint.read_state(path)
    for name in ("pp", "cp"):
        setup = setup_of(path, saved, world=2, wanted=Wanted((name,), (f"parallel.{name}=2",)))
        assert Layout.of(setup.config.parallel, 2) == Layout(**{name: 2})
    setup = setup_of(path, saved, world=2, wanted=Wanted(set=("train.global_batch=4",)))
    assert Layout.of(setup.config.parallel, 2) == Layout(dp_shard=2)
    with pytest.raises(ConfigError) as error:
        setup_of(path, saved, world=2, wanted=Wanted(("pp",), ("parallel.pp=4",)))
    assert "can't be opened on 2 processes:\n" in str(error.value)
    assert "parallel.pp=4: parallel.pp: pp × " in str(error.value)
    assert str(error.value).endswith("= 4, but there are 2 processes.")


@pytest.mark.unit
def test_what_is_only_looked_at_can_not_be_written(run: Path) -> None:
    job = open_model(run).job
    assert job.run.dir == run
    with pytest.raises(ForgeError, match=r"artifacts/sample\.txt can't be written"):
        job.run.artifact("sample.txt")
    with pytest.raises(ForgeError, match=r"events\.jsonl can't be written"):
        job.run.event("run_started", 0, run="", plugins=[], world=1)


@pytest.mark.unit
def test_a_runs_configuration_repeats_it_without_the_plugins_it_went_without(tmp_path: Path) -> None:
    """A preset's plugin that was left out is not asked for by the run's file, and so needs no leaving out."""
    values = (*tiny_models.DECODER, *tiny_models.TRAIN, f"text.path={tiny_models.text_file(tmp_path)}")
    without = ("console", "tensorboard", "sample")
    asked = Request(config="quickstart", without=without, set=(*values, "cosine.warmup=0"))
    first = train(resolve(asked), run_dir=tmp_path / "runs")
    again = resolve(Request(config=str(first.run / "config.toml")))
    assert set(again.config.without) == {"console", "tensorboard"}
    assert open_model(first.run).step == 3

"""`forge presets`: what is listed, and that each preset trains. Those of several processes: tests/dist."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_command import Forge
from forge_train_cli.presets import Preset, everything, read
from packages import package
from preset_settings import settings

ALONE = [one.name for one in everything() if one.processes == 1 and not one.needs and not one.parameters]


def test_the_list(forge: Forge) -> None:
    techniques, models = (part.splitlines() for part in forge("presets").out.split("\n\n"))
    lines = techniques + models[1:]
    assert lines[0].startswith("forge train quickstart ")
    (fsdp2,) = (line for line in lines if line.startswith("forge train fsdp2 --nproc 2 "))
    assert fsdp2.endswith("sharded. (2 processes)")
    found = forge("presets", "--json").json
    assert [one["command"] for one in found] == [line[: line.index("  ")] for line in lines]
    assert not [one["name"] for one in found if not one["summary"].endswith(".")]
    lessons = [one["lesson"] for one in found if not one["parameters"]]
    assert lessons == list(range(1, len(techniques) + 1))


def test_every_technique_that_is_a_plugin_has_a_preset() -> None:
    from forge_train.registry.discovery import DISTRIBUTION, discover
    from forge_train_cli.roles import role

    told = "\n".join(Path(one.file).read_text(encoding="utf-8") for one in everything())
    techniques = {"parallelism", "memory", "precision", "experts"}
    own = [one for one in discover() if one.distribution == DISTRIBUTION and role(one) in techniques]
    brought = {"sequential", "alltoall", "precision", "loss_scaler"}  # defaults of the presets that need them
    assert [one.name for one in own if f'"{one.name}"' not in told and one.name not in brought] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_a_preset_trains(forge: Forge, folder: Path, name: str) -> None:
    said = forge("train", name, *settings(folder / "corpus.txt", name), "--json", "--without", "tensorboard").json
    assert (said["outcome"], said["step"]) == ("done", 2)
    assert 4 < said["loss"] < 7


def test_a_preset_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path / "site", "padded", {}, {"axes": {"pods": "padded.axes:PODS"}})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    file = tmp_path / "theirs.toml"
    file.write_text(
        "# Theirs.\n# Needs: luck.\n[run]\ndevice = 'cuda'\n[parallel]\ndp_shard = -1\ntp = 2\npods = 2\nep = 2\n"
    )
    found = read("theirs", file)
    assert found == Preset("theirs", "Theirs.", 4, "cuda", "luck.", "forge train theirs --nproc 4", str(file), 1000)
    assert found.wants == "4 processes, cuda; luck."

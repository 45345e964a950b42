"""`forge bench collectives`: two real ranks, and the file that `forge plan` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_command import Forge
from forge_train_tools.planning.clusters import KINDS, cluster

MEASURE = ("bench", "collectives", "tiny.toml", "--nproc", "2", "--largest", "0.125", "--repeat", "1")


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_are_measured(forge: Forge, folder: Path) -> None:
    found = forge(*MEASURE, "--out", "here.toml", "--json").json
    assert (found["world"], found["devices"], found["backend"]) == (2, 2, "gloo")
    assert {(one["kind"], one["held"]) for one in found["samples"]} == {
        (kind, held) for kind in KINDS for held in (4 << 10, 32 << 10)
    }
    assert all(0 < one["seconds"] < 60 for one in found["samples"])
    assert [one["kind"] for one in found["fits"]] == ["all", *KINDS]
    assert 0 < found["efficiency"] <= 1
    made = cluster(str(folder / "here.toml"))
    own = {one["kind"]: one for one in found["fits"]}
    assert made.links[0].bandwidth == pytest.approx(own["all"]["bandwidth"], rel=1e-3)
    assert made.links[0].measured["send"].latency == pytest.approx(own["send"]["latency"], rel=1e-3)
    assert made.peak == pytest.approx(found["peak"], rel=1e-3)
    assert "CPU" in forge("plan", "tiny.toml", "-s", "train.micro_batch=1", "--device", "here.toml").out
    assert "here.toml exists; name another file" in forge(*MEASURE, "--out", "here.toml", fails=2).err


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge_train_tools.launching.once.launch_once", lambda *_: pytest.fail("it was measured"))
    assert "--out nowhere/here.toml: the folder" in forge(*MEASURE, "--out", "nowhere/here.toml", fails=2).err


def test_one_process_has_no_collectives(forge: Forge) -> None:
    assert "add --nproc N" in forge("bench", "collectives", "tiny.toml", fails=2).err


def test_training_is_measured_without_its_name(forge: Forge) -> None:
    assert "no preset 'nope'" in forge("bench", "nope", fails=2).err
    assert "no preset 'nope'" in forge("bench", "training", "nope", fails=2).err
    assert "collectives" in forge("bench", "--help").out

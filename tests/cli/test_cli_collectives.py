"""`forge plan --check-collectives`: exit codes, JSON, and the line of a planted fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_command import Forge
from forge_train_cli.app import run

PLANTED = '''
import torch
from forge_train import Applied, Phase, Plugin, Transform, hookimpl

class Alone(Plugin):
    """One rank calls a collective that the other does not."""
    api = (1, 0)

    @hookimpl
    def parallelize(self, job):
        def apply(part):
            if job.dist.rank == 0:
                job.dist.all_reduce(torch.zeros(2))
            return Applied(part, (part.units[0],))
        return Transform(Phase.RECOMPUTE, "alone", apply)
'''
READS = '''
import torch
from forge_train import Applied, Phase, Plugin, Transform, hookimpl

class Reads(Plugin):
    """A model that reads values in its forward pass."""
    api = (1, 0)

    @hookimpl
    def parallelize(self, job):
        def apply(part):
            part.register_forward_hook(lambda module, given, hidden: hidden * (1 if hidden.sum() > 0 else 2))
            return Applied(part, (part.units[0],))
        return Transform(Phase.RECOMPUTE, "reads", apply)
'''
TWO = ("plan", "tiny.toml", "--world", "2", "-p", "fsdp2", "-s", "train.global_batch=4", "--check-collectives")


@pytest.mark.slow
def test_ranks_that_agree(forge: Forge) -> None:
    made = forge(*TWO, "--json").json
    assert made["faults"] == made["notes"] == []
    assert [(one["name"], one["ranks"]) for one in made["classes"]] == [("every rank", 2)]
    assert (made["world"], made["rehearsed"]) == (2, 2)


@pytest.mark.slow
def test_a_rank_alone(
    forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(str(folder))
    assert run([*TWO, "-p", "planted:Alone"]) == 1
    shown = capsys.readouterr().out
    line = PLANTED.splitlines().index("                job.dist.all_reduce(torch.zeros(2))") + 1
    assert "Fault: skipped" in shown
    assert f"planted.py:{line}, in apply" in " ".join(shown.split())
    assert "composition" in shown


def test_what_cannot_be_checked_is_not_passed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "reading.py").write_text(READS)
    monkeypatch.syspath_prepend(str(folder))
    assert run([*TWO, "-p", "reading:Reads"]) == 1
    shown = capsys.readouterr().out
    assert "Not checked: collectives from forward on" in shown
    assert "No fault in what was checked." in shown
    assert "All ranks make the same calls" not in shown


@pytest.mark.parametrize("option", ["--search", "--schedules", "--device=h100"])
def test_options_that_would_do_nothing(forge: Forge, option: str) -> None:
    ended = forge(*TWO, option, fails=2)
    assert f"{option.partition('=')[0]} is of no use with --check-collectives" in ended.err


def test_a_single_rank(forge: Forge) -> None:
    assert "No rank calls a collective" in forge("plan", "tiny.toml", "--check-collectives").out

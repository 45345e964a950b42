"""Two packages written from the pages alone: a committee of output layers, spread over an axis of its own, and a
measure of what a model does not know, whose hook the committee answers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forge_cli
import pages
from forge_cli import Ended
from forge_train.run import records
from packages import install, package

pytestmark = [pytest.mark.dist, pytest.mark.e2e]

PLUGINS = ("committee", "members", "mean_vote", "log_vote", "disagreement", "selective")
STEPS = 8
CONFIG = f"""\
plugins = ["committee", "members", "disagreement", "selective", "./kill.py"]
[committee]
members = 4
bootstrap = true
[text]
path = "text.txt"
held_out = 0.5
[adamw]
lr = 0.03
{forge_cli.DECODER}"""
SETTINGS = (f"train.steps={STEPS}", "train.evaluate_every=4", "train.evaluate_batches=2", "checkpoint.every=3")
KILL = """
import os
import signal
from pathlib import Path

from forge_train import Plugin, hookimpl


class Kill(Plugin):
    "Kills rank 1 after step 5, if a file says so."

    api = (1, 0)

    @hookimpl
    def on_step(self, step):
        if step.step == 5 and os.environ.get("RANK") == "1" and Path("killing").exists():
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module", autouse=True)
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to work in; the packages are installed in this process and in those that it starts."""
    folder = tmp_path_factory.mktemp("desk")
    site = folder / "site"
    install(site, "forge_committee", "forge_selective")
    (folder / "mine.toml").write_text(CONFIG, encoding="utf-8")
    (folder / "text.txt").write_text("say one and then say two\n" * 200, encoding="utf-8")
    (folder / "kill.py").write_text(KILL, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), forge_cli.environment()["PYTHONPATH"]]))
        patch.chdir(folder)
        yield folder


def forge(*arguments: object, code: int = 0) -> Ended:
    done = forge_cli.forge(*arguments)
    assert done.code == code, done.out + done.err
    return done


def train(name: str, code: int = 0) -> Ended:
    """A run on two ranks, each with two of the four members."""
    settings = [item for setting in (*SETTINGS, "parallel.members=2") for item in ("-s", setting)]
    return forge("train", "mine.toml", "--nproc", 2, "--name", name, *settings, code=code)


def numbers(run: str) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key not in {*records.TIMINGS, *line.get("timing", ())}}
        for line in records.read(Path("runs", run, "metrics.jsonl"))
    ]


def evaluations(run: str) -> list[dict[str, Any]]:
    events = records.read(Path("runs", run, "events.jsonl"))
    return [dict(event["metrics"], loss=event["loss"]) for event in events if event["event"] == "evaluation"]


@pytest.fixture(scope="module")
def whole(desk: Path) -> str:
    """An undisturbed run."""
    train("whole")
    assert [line["step"] for line in numbers("whole")] == list(range(1, STEPS + 1))
    return "whole"


def test_their_plugins_conform() -> None:
    reports = forge("plugins", "check", *PLUGINS, "--json").json["plugins"]
    assert [report["name"] for report in reports] == list(PLUGINS)
    checks = {(report["name"], check["name"]): check["status"] for report in reports for check in report["checks"]}
    assert "fail" not in checks.values()
    assert checks["members", "agrees with one process (members = 2)"] == "ok"
    for vote in ("mean_vote", "log_vote"):
        assert checks[vote, "vote: agrees with members that agree"] == "ok"


def test_members_on_two_ranks_compute_what_one_process_does() -> None:
    done = forge("verify", "mine.toml", "--nproc", 2, "--steps", 2, "-s", "parallel.members=2", "--json")
    assert done.json["agree"], done.json


def test_a_killed_run_goes_on_with_the_numbers_of_an_undisturbed_one(whole: str) -> None:
    Path("killing").touch()
    said = train("killed", code=1).err
    assert "Rank 1 was killed by SIGKILL after step 5" in said
    Path("killing").unlink()
    train("killed")
    (resumed,) = [line for line in records.read(Path("runs/killed/events.jsonl")) if line["event"] == "resumed"]
    assert resumed["step"] == 3
    assert numbers("killed") == numbers(whole)
    before, last = evaluations(whole)
    assert evaluations("killed") == [before, before, last], "that of step 4 was done twice, alike"
    left, right = (sorted(Path("runs", run).glob(f"checkpoints/*{STEPS}/*.safetensors")) for run in ("killed", whole))
    assert len(left) == 2
    assert [file.read_bytes() for file in left] == [file.read_bytes() for file in right]


def test_the_hook_of_one_package_is_answered_by_the_other(whole: str) -> None:
    (hook,) = [one for one in forge("plugins", "hooks", "--json").json if one["hook"] == "uncertainty"]
    assert hook["declared_by"]["distribution"] == "forge-selective"
    assert hook["implemented_by"] == ["disagreement", "selective"]
    before, last = evaluations(whole)
    for measured in (before, last):
        assert 0 < measured["selective.disagreement_auroc"] < 1
        assert measured["committee.gain"] > 0, "Jensen: the vote is better than the mean of its members"
    alone = forge("eval", f"runs/{whole}", "--json").json["metrics"]
    for name in ("committee.gain", "committee.disagreement"):
        assert alone[name] == pytest.approx(last[name], rel=1e-4)
    name = "selective.disagreement_auroc"
    assert alone[name] == pytest.approx(last[name], abs=0.01), "rounding swaps the ranks of equal contexts"


def test_a_command_reads_the_fact_of_plugins_that_are_not_imported() -> None:
    assert forge("votes").out.split() == ["log_vote", "log", "mean_vote", "linear"]


def test_the_axis_of_the_page_that_divides_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (pages.HOW_TO / "add-an-axis.md").read_text(encoding="utf-8")
    files = dict(re.findall(r'```python title="voters/(\w+\.py)"\n(.*?)```', page, re.DOTALL))
    points = {"plugins": {"voters": "voters.plugin:Voters"}, "axes": {"voters": "voters.axes:VOTERS"}}
    package(tmp_path, "voters", files, points)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    (report,) = forge("plugins", "check", "voters", "--json").json["plugins"]
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert "fail" not in status.values()
    assert status["agrees with one process (voters = 2)"] == "ok"

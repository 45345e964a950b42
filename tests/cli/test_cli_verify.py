"""`forge verify` says what a comparison found. What is found is shown in `tests/dist/test_verify.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_command import Forge
from forge_train.run.records import read
from forge_train_cli.app import run
from forge_train_tools import verification
from forge_train_tools.verification import Check, Verdict
from forge_train_tools.verification.routing import RoutingDifference

LOSS = Check("loss", 2e-5, 1e-5, "relative")
DATA = Check("data", 0, 0, "steps whose sequences are others")
TIE = RoutingDifference(1, "experts of layers.0.router", moved=2, near=3, allowed=1e-5)


@pytest.mark.parametrize(
    ("checks", "routing_difference", "code", "says"),
    [
        ((DATA,), None, 0, "They agree."),
        ((DATA,), TIE, 1, "Undecided: they agree in everything that could be compared."),
        ((DATA, LOSS), TIE, 1, "They do not agree."),
    ],
)
@pytest.mark.usefixtures("folder")
def test_how_it_ends(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    checks: tuple[Check, ...],
    routing_difference: RoutingDifference | None,
    code: int,
    says: str,
) -> None:
    verdict = Verdict(
        "two against one", ("1", "2"), checks, ((1.0, 1.0),), advice=("why",), routing_difference=routing_difference
    )
    monkeypatch.setattr(verification, "verify", lambda *args, **more: verdict)
    assert run(["verify", "tiny.toml", "--nproc", "2"]) == code
    shown = capsys.readouterr().out
    assert says in shown
    assert "why" in shown, "there is something to say of a comparison that agrees too: that no update was compared"
    assert run(["verify", "tiny.toml", "--nproc", "2", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["agree"], found["undecided"]) == (code == 0, says.startswith("Undecided"))


@pytest.mark.slow
def test_weights_that_are_there_are_what_is_verified(forge: Forge) -> None:
    forge("train", "tiny.toml", "--name", "first", "--quiet")
    own = ("verify", "tiny.toml", "--against", "precision=bf16", "--steps", "1", "--json")
    start = json.loads(forge(*own).out)
    trained = json.loads(forge(*own, "-s", "train.init_from=runs/first").out)
    assert start["agree"]
    assert trained["agree"]
    assert trained["losses"][0][0] != start["losses"][0][0]
    forge("train", "tiny.toml", "--name", "second", "--quiet", "-s", "train.init_from=runs/first", "-s", "log.every=1")
    assert next(iter(read(Path("runs/second/metrics.jsonl"))))["loss"] == trained["losses"][0][0]


def test_how_long_to_train_need_not_be_said(forge: Forge, folder: Path) -> None:
    file = folder / "tiny.toml"
    file.write_text(file.read_text(encoding="utf-8").replace("steps = 6\n", ""), encoding="utf-8")
    found = json.loads(forge("verify", "tiny.toml", "--against", "micro_batch=1", "--steps", "2", "--json").out)
    assert len(found["losses"]) == 2

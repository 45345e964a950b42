"""`forge verify` says what a comparison found. What is found is shown in `tests/dist/test_verify.py`."""

from __future__ import annotations

import json

import pytest

from forge_train import verification
from forge_train.verification import Check, Verdict
from forge_train.verification.routing import Parting
from forge_train_cli.app import run

LOSS = Check("loss", 2e-5, 1e-5, "relative")
DATA = Check("data", 0, 0, "steps whose sequences are others")
TIE = Parting(1, "experts of layers.0.router", moved=2, near=3, precision="fp32")


@pytest.mark.parametrize(
    ("checks", "parting", "code", "says"),
    [
        ((DATA,), None, 0, "They agree."),
        ((DATA,), TIE, 1, "Undecided: they agree in what could be compared."),
        ((DATA, LOSS), TIE, 1, "They do not agree."),
    ],
)
@pytest.mark.usefixtures("folder")
def test_how_it_ends(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    checks: tuple[Check, ...],
    parting: Parting | None,
    code: int,
    says: str,
) -> None:
    verdict = Verdict("two against one", ("1", "2"), checks, ((1.0, 1.0),), advice=("why",), parting=parting)
    monkeypatch.setattr(verification, "verify", lambda *args, **more: verdict)
    assert run(["verify", "tiny.toml", "--nproc", "2"]) == code
    shown = capsys.readouterr().out
    assert says in shown
    assert ("why" in shown) == (code == 1)
    assert run(["verify", "tiny.toml", "--nproc", "2", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["agree"], found["undecided"]) == (code == 0, says.startswith("Undecided"))

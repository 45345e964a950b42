"""`forge eval` asks the plugins of other packages that the run asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_cli import DECODER, forge
from packages import package

pytestmark = pytest.mark.e2e

HOOKS = '''
from forge_train import Job, hookspec


@hookspec("questions", observes=True)
def guess(job: Job) -> float | None:
    """A guess, which the evaluation adds up."""
'''
ASKER = """
from forge_train import Plugin, hookimpl
from forge_train_kit.contract import Evaluator
from guessing.hooks import guess


class Asker(Plugin):
    "Adds up guesses."

    api = (1, 0)

    @hookimpl
    def evaluators(self, job):
        from forge_train_kit.metrics import Mean

        guessed, found = Mean(), dict(guess(job))

        def measure(part, hidden, batch):
            for number in found.values():
                guessed.update(hidden.new_tensor([number]))

        return Evaluator("asker", lambda: job.hooks.build_data("validation"), measure, {"guessed": guessed})


class Guesser(Plugin):
    "Guesses 7, and does nothing else."

    api = (1, 0)

    @hookimpl
    def guess(self):
        return 7.0
"""


def test_an_observer_that_only_other_packages_ask_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes no number of the run, and the numbers of an evaluation are not there without it."""
    points = {
        "plugins": {"asker": "guessing.plugin:Asker", "guesser": "guessing.plugin:Guesser"},
        "hookspecs": {"guessing": "guessing.hooks"},
    }
    package(tmp_path / "site", "guessing", {"hooks.py": HOOKS, "plugin.py": ASKER}, points)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(f"{DECODER}\n[text]\npath = 'a.txt'\nheld_out = 0.5\n", encoding="utf-8")
    Path("a.txt").write_text("say one and then say two\n" * 200, encoding="utf-8")
    ended = forge("train", "mine.toml", "-p", "asker,guesser", "--name", "a", "-s", "train.evaluate_every=1", "--quiet")
    assert ended.code == 0, ended.err
    ended = forge("eval", "runs/a", "--json")
    assert ended.code == 0, ended.err
    assert ended.json["metrics"]["asker.guessed"] == 7.0

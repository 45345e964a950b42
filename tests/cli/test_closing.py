"""What is suggested after a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import toys
from forge_train import ConfigError, hookimpl
from forge_train.registry.setup import Setup
from forge_train_cli import closing
from forge_train_cli.closing import next_commands

pytestmark = [pytest.mark.unit]


class Exports(toys.Bare):
    """Fails when it is asked where its model goes."""

    error: Exception = LookupError("no such layer")

    @hookimpl
    def export_hf(self, job: Any) -> Any:
        raise self.error


def test_an_export_that_fails_is_told_and_not_suggested(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = toys.run(tmp_path, Exports, steps=1)
    monkeypatch.setattr(Exports, "error", ConfigError("a model without a place there"))
    monkeypatch.setattr(closing, "_opened", lambda _: run.job)  # classes can't be found by their names
    caplog.clear()
    next_commands(run.finished, Setup(run.job.config, run.job.hooks))
    assert not caplog.messages, "that is an answer"
    monkeypatch.setattr(Exports, "error", LookupError("no such layer"))
    commands = [command for _, command in next_commands(run.finished, Setup(run.job.config, run.job.hooks))]
    assert any("runs show" in one for one in commands)
    assert not any("checkpoint export" in one for one in commands)
    (told,) = caplog.messages
    assert told.startswith("Plugin 'exports' failed in export_hf, so its model can't be exported as it is: ")
    assert "no such layer" in told


@pytest.mark.parametrize(
    ("artifact", "option"),
    [('{"image": "a b.png"}', " --image 'a b.png'"), ('{"video": "a.mp4"}', " --item video=a.mp4"), ("", "")],
)
def test_an_item_of_the_data_is_shown_whatever_its_modality(tmp_path: Path, artifact: str, option: str) -> None:
    (tmp_path / "artifacts").mkdir()
    if artifact:
        (tmp_path / "artifacts" / closing.ITEM).write_text(artifact)
    assert closing._item(tmp_path) == option

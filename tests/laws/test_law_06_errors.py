"""Law 6. Errors are for people: one message for a mistake; a plugin's failure names plugin, distribution and hook.

Every case of bad input is in tests/e2e/test_bad_input.py; here are the exit codes, and failures inside plugins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_cli import forge, one_message
from forge_train import Applied, BatchPhase, DivergedError, Phase, Plugin, PrepareBatch, Transform, hookimpl
from forge_train_tools.testing import installed

pytestmark = [pytest.mark.e2e]


def fail(*arguments: Any, **more: Any) -> Any:
    """What every plugin here fails with, two calls deep."""

    def inner() -> Any:
        raise LookupError("what went wrong\nand more of it")

    return inner()


@contextmanager
def failing_span() -> Iterator[None]:
    fail()
    yield


FAILURES = {
    "build_model": ({"build_model": fail}, "hook build_model"),
    "optimizer": ({"optimizer": fail}, "hook optimizer"),
    "parallelize": ({"parallelize": fail}, "hook parallelize"),
    "a transform": (
        {"parallelize": lambda self, job: Transform(Phase.ADAPT, "x", lambda part: fail() or Applied(part))},
        "hook parallelize (x)",
    ),
    "on_start": ({"on_start": fail, "on_step": lambda self, step: None}, "hook on_start"),
    "on_gradients": ({"on_gradients": fail}, "hook on_gradients"),
    "on_step": ({"on_step": fail}, "hook on_step"),
    "on_checkpoint": ({"on_checkpoint": fail, "on_step": lambda self, step: None}, "hook on_checkpoint"),
    "prepare_batch": ({"prepare_batch": lambda self, job: PrepareBatch(BatchPhase.MASK, fail)}, "hook prepare_batch"),
    "a span": ({"around": lambda self, span, job: failing_span if span == "optimizer" else None}, "hook around"),
    "check_config": ({"check_config": fail}, "hook check_config"),
}


@pytest.mark.parametrize("place", FAILURES)
def test_a_plugins_failure_is_named_and_its_traceback_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    members, hook = FAILURES[place]
    methods = {name: hookimpl(_method(function)) for name, function in members.items()}
    failing = type("Failing", (Plugin,), {"api": (1, 0), **methods})
    monkeypatch.chdir(tmp_path)
    without = ["--without", "toy_model"] if "build_model" in members else []
    with installed() as found:
        found.add(failing, name="failing", distribution="forge-failing", version="1.2")
        ended = forge("train", toys.write_config(tmp_path), "--quiet", "--name", "a", "-p", "failing", *without)
        message = one_message(ended, 1)
        assert message.startswith("LookupError: what went wrong\n")
        assert f"in plugin 'failing' (forge-failing 1.2){', ' + hook if hook else ''}" in message
        assert "test_law_06_errors.py" in message
    log = tmp_path / "runs" / "a" / "log" / "rank-0.log"
    if place != "check_config":
        text = log.read_text(encoding="utf-8")
        assert str(log.relative_to(tmp_path)) in message
        assert "in inner" in text
        assert "LookupError: what went wrong" in text


def _method(function: Any) -> Any:
    """A method with the arguments that a hook may have; `fail` takes any."""
    return (lambda self: function(self)) if function is fail else function


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--version",), 0),
        (("plugins", "list"), 0),
        (("train", "{toys}", "--quiet"), 0),
        (("train", "{toys}", "-p", "loin"), 2),
        (("train", "{toys}", "--no-such-option"), 2),
        (("no-such-command",), 2),
        (("train", "no-such.toml"), 2),
        (("config", "show", "-s", "train.steps=x"), 2),
        (("train", "{toys}", "--quiet", "-p", "fails"), 1),
        (("train", "{toys}", "--quiet", "-p", "diverges"), 3),
        (("train", "{toys}", "--quiet", "-p", "stops"), 75),
    ],
)
def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int) -> None:
    def diverge(self: Any, step: Any) -> None:
        raise DivergedError("too far")

    def stop(self: Any, job: Any) -> None:
        job.control.stop("enough")

    monkeypatch.chdir(tmp_path)
    file = str(toys.write_config(tmp_path))
    plugins = {"Fails": ("on_step", fail), "Diverges": ("on_step", diverge), "Stops": ("on_start", stop)}
    with installed(
        type(name, (Plugin,), {hook: hookimpl(_method(function))}) for name, (hook, function) in plugins.items()
    ):
        ended = forge(*(argument.format(toys=file) for argument in arguments))
        assert ended.code == code, ended.err
        assert "Traceback" not in ended.out + ended.err
        if arguments[:2] == ("train", "{toys}") and code in (0, 1, 3, 75):
            ended = forge(*(argument.format(toys=file) for argument in arguments if argument != "--quiet"), "--json")
            outcomes = {0: "done", 1: "failed", 3: "diverged", 75: "interrupted"}
            assert ended.code == code
            assert json.loads(ended.out)["outcome"] == outcomes[code]

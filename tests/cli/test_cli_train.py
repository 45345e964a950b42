"""`forge train`, from its options to its exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest

import forge_cli
from forge_command import Forge

FAULTY = """
from forge_train import Plugin, hookimpl

class Boom(Plugin):
    '''Fails.'''
    api = (1, 0)

    @hookimpl
    def on_step(self, step):
        if step.step == 4:
            raise RuntimeError("kaput\\nand more")
"""


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def enabled(run: Path) -> set[str]:
    return {one["name"] for one in json.loads((run / "plugins.json").read_text())}


def test_trains_and_shows_it(forge: Forge, folder: Path) -> None:
    (folder / "corpus.txt").write_text("a text that no other test has tokenised\n" * 200, encoding="utf-8")
    done = forge("train", "tiny.toml")
    assert "step 6/6 · loss " in done.out
    assert "held out: loss " in done.out
    assert done.err == ""
    assert re.search(r"^text: tokenised 1 document, 0\.0 MB, .* MB/s, in \d+:\d\d$", done.out, re.MULTILINE)
    assert done.out.count("tokenis") == 1


def test_what_it_says_to_type_next_can_be_typed(forge: Forge, folder: Path) -> None:
    done = forge("train", "tiny.toml", "--run-dir", "my runs")
    (run,) = (folder / "my runs").iterdir()
    lines = [line for line in done.out.partition("\nNext\n")[2].splitlines() if not line.startswith("  first")]
    commands = [shlex.split(line.partition("  forge ")[2]) for line in lines]
    assert [words[0] for words in commands] == ["generate", "runs", "train", "checkpoint"]
    assert all(f"my runs/{run.name}" in words for words in commands)
    prompt = commands[0][commands[0].index("--prompt") + 1]
    assert prompt
    assert prompt in (folder / "corpus.txt").read_text(encoding="utf-8")
    assert commands[2][-1] == "train.steps=12"
    for words in commands:
        forge(*words)


def test_an_export_that_would_be_refused_is_not_suggested(forge: Forge, folder: Path) -> None:
    said = forge("train", "tiny.toml", "-s", "decoder.norm=layer", "--name", "normed").out.partition("\nNext\n")[2]
    assert "forge generate runs/normed --prompt" in said
    assert "forge checkpoint export" not in said
    assert (
        'decoder.norm is "layer" here, but "rms" there'
        in forge("checkpoint", "export", "runs/normed", "there", fails=2).err
    )


def test_a_model_that_looks_ahead_is_not_offered_to_write(forge: Forge) -> None:
    """`forge generate` would refuse it."""
    done = forge("train", "tiny.toml", "-p", "moe", "-s", "moe.router=expert_choice", "-s", "moe.balance=0")
    assert "forge runs show" in done.out
    assert "forge generate" not in done.out


def test_json_is_one_object_on_stdout(forge: Forge, folder: Path) -> None:
    done = forge("train", "tiny.toml", "--json")
    assert done.json["run"] == f"runs/{only_run(folder).name}"
    assert (done.json["step"], done.json["outcome"]) == (6, "done")
    assert 0 < done.json["loss"] < 20
    assert done.err == ""


def test_quiet_says_nothing_and_changes_no_number(forge: Forge, folder: Path) -> None:
    assert forge("train", "tiny.toml", "--name", "quiet", "--quiet").out == ""
    forge("train", "tiny.toml", "--name", "loud")
    losses = [
        [json.loads(line)["loss"] for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("quiet", "loud")
    ]
    assert losses[0] == losses[1]
    assert "console" in enabled(folder / "runs" / "quiet")


def test_names_with_commas_and_by_repeating(forge: Forge, folder: Path) -> None:
    forge("train", "tiny.toml", "-p", "lion,gqa", "--plugins", "sdpa", "--without", "tensorboard", "-q")
    run = only_run(folder)
    assert run.name.startswith("tiny-gqa-lion-sdpa-")
    assert {"lion", "gqa", "sdpa"} <= enabled(run)
    assert "tensorboard" not in enabled(run)


def test_the_environment_is_weaker_than_set(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_SET", "train.steps=2; log.every=2")
    assert forge("train", "tiny.toml", "--json").json["step"] == 2
    assert forge("train", "tiny.toml", "--json", "-s", "train.steps=3").json["step"] == 3


def test_a_named_run_is_continued_and_a_finished_one_says_so(forge: Forge, folder: Path) -> None:
    forge("train", "tiny.toml", "--name", "mine", "-q")
    assert "had finished before" in forge("train", "tiny.toml", "--name", "mine").out
    again = forge("train", "tiny.toml", "--name", "mine", "-s", "train.steps=8")
    assert "step 6/8 · resumed from" in again.out
    assert "2 more steps" in again.out
    forge("train", "tiny.toml", "--name", "mine", "--resume", "never", "-q")
    assert {path.name for path in (folder / "runs").iterdir()} == {"mine", "mine-2"}


def test_resume_takes_the_run_s_own_configuration(forge: Forge, folder: Path) -> None:
    forge("train", "tiny.toml", "--name", "mine", "-q", "-s", "adamw.lr=0.01")
    done = forge("train", "--resume", "runs/mine", "--json", "-s", "train.steps=7")
    assert (done.json["run"], done.json["step"]) == ("runs/mine", 7)
    assert "lr = 0.01" in (folder / "runs" / "mine" / "config.toml").read_text()


def test_a_checkpoint_starts_a_new_run(forge: Forge, folder: Path) -> None:
    forge("train", "tiny.toml", "--name", "mine", "-q")
    done = forge("train", "--resume", "runs/mine/checkpoints/step-00000003", "--name", "second", "--json")
    assert (done.json["run"], done.json["step"]) == ("runs/second", 6)
    first = json.loads((folder / "runs" / "second" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tiny.tml"], "no preset 'tiny.tml'"),
        (["quikstart"], "Did you mean 'quickstart'?"),
        (["missing.toml"], "missing.toml: can't read the configuration"),
        (["tiny.toml", "-p", "lino"], "--plugins: there is no plugin named 'lino'. Did you mean 'lion'?"),
        (["tiny.toml", "-p", "a,,b"], "expected names, separated by commas"),
        (["tiny.toml", "-p", "lion,adamw"], "both fill the slot 'optimizer'"),
        (["tiny.toml", "--without", "lion"], "'lion' would not be enabled anyway"),
        (["tiny.toml", "-s", "train.steps"], "expected key=value"),
        (["tiny.toml", "-s", "train.step=5"], "Did you mean 'steps'?"),
        (["tiny.toml", "--name", "a/b"], "expected the name of a folder"),
        (["tiny.toml", "--name", ""], "expected a name"),
        (["tiny.toml", "--resume", "nowhere"], "expected auto, never, or the path of a run or a checkpoint"),
        (["tiny.toml", "--stes", "5"], "No such option"),
        (["tiny.toml", "tiny.toml"], "unexpected extra argument"),
    ],
)
def test_mistakes(forge: Forge, folder: Path, arguments: list[str], says: str) -> None:
    assert says in forge("train", *arguments, fails=2).err
    assert not (folder / "runs").exists()


def test_every_mistake_at_once(forge: Forge) -> None:
    error = forge("train", "tiny.toml", "-s", "train.stps=1", "-s", "decoder.dim=x", "-s", "adamw.lr=-1", fails=2).err
    assert all(key in error for key in ("train.stps", "decoder.dim", "adamw.lr"))


def test_a_mistake_with_json(forge: Forge) -> None:
    done = forge("train", "tiny.toml", "-p", "lino", "--json", fails=2)
    result = done.json
    assert result["error"].pop("message").startswith("--plugins: there is no plugin named 'lino'.")
    error = {"type": "configuration", "rank": 0, "phase": "configure", "plugin": "", "hook": "", "key": ""}
    assert result == {"run": None, "step": 0, "loss": None, "outcome": "failed", "error": error}


def test_a_plugin_s_failure_is_named_and_logged(forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "faulty.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(folder))
    done = forge("train", "tiny.toml", "-p", "faulty:Boom", "--name", "mine", "--json", fails=1)
    assert (done.json["run"], done.json["step"], done.json["outcome"]) == ("runs/mine", 4, "failed")
    assert "Error: RuntimeError: kaput\n  in plugin 'boom'" in done.err
    assert "hook on_step" in done.err
    assert "faulty.py:11, in on_step" in done.err
    log = folder / "runs" / "mine" / "log" / "rank-0.log"
    assert str(log.relative_to(folder)) in done.err
    assert "Traceback" in log.read_text()
    assert "in plugin 'boom'" in log.read_text()


def test_the_traceback_on_demand(forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "faulty2.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("FORGE_TRACEBACK", "1")
    with pytest.raises(AssertionError, match="Traceback"):
        forge("train", "tiny.toml", "-p", "faulty2:Boom", fails=1)


def test_a_run_that_diverges(forge: Forge) -> None:
    done = forge("train", "tiny.toml", "-s", "adamw.lr=1e30", "-s", "train.clip_norm=0", "--json", fails=3)
    assert done.json["outcome"] == "diverged"
    assert done.json["loss"] is None
    assert "Training diverged" in done.err


@pytest.mark.slow
@pytest.mark.e2e
def test_an_interrupted_run_saves_and_says_how_to_go_on(folder: Path) -> None:
    """By Ctrl-C; tests/kernel/test_engine.py knows the other signals."""
    environment = {**os.environ, "FORGE_SET": "checkpoint.every=0;train.evaluate_every=0"}
    command = ("train", "tiny.toml", "--name", "mine", "-s", "train.steps=100000")
    started = forge_cli.start(*command, preloaded=True, env=environment, cwd=folder)
    metrics = folder / "runs" / "mine" / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=600)
    assert started.returncode == 75, err
    assert "SIGINT" in err
    assert "forge train --resume runs/mine" in out
    step = len(metrics.read_text().splitlines())
    assert (folder / "runs" / "mine" / "checkpoints" / f"step-{step:08d}").is_dir()


def test_a_checkpoint_that_was_pruned(forge: Forge) -> None:
    forge("train", "tiny.toml", "--name", "first", "--quiet", "-s", "checkpoint.keep=1")
    told = forge("train", "tiny.toml", "--resume", "runs/first/checkpoints/step-00000003", fails=2).err
    assert "step-00000003: there is no such checkpoint; the run has step-00000006." in told

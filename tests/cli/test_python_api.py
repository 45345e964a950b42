"""The Python API: it does what the commands do, and leaves the process as it found it."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forge_train_tools
import warm
from forge_command import Forge
from forge_train import ConfigError, DivergedError, ForgeError, Job, Plugin, StepResult, hookimpl
from forge_train_tools import RunFolder, open_model, open_run, plan, train, verify
from forge_train_tools.sources import as_assignments
from forge_train_tools.testing import installed

pytestmark = pytest.mark.usefixtures("folder")
SMALL = {"train.steps": 2}


class Interrupting(Plugin):
    """Sends signals to its process in the first step."""

    api = (1, 0)
    signals: tuple[signal.Signals, ...] = ()

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        if step.step == 1:
            for number in self.signals:
                os.kill(os.getpid(), number)


class Waiting(Plugin):
    """Waits in the first step until it is told to go on."""

    api = (1, 0)
    there, go = threading.Event(), threading.Event()

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self.there.set()
        assert self.go.wait(300)


class Failing(Plugin):
    """Fails in the first step, after it has changed what a plugin may change."""

    api = (1, 0)
    error: type[BaseException] = ValueError

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        torch.use_deterministic_algorithms(True)
        os.environ["FORGE_TEST_LEFT"] = "1"
        raise self.error("as asked")


class Nested(Plugin):
    """Trains in a training."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Job) -> None:
        train("tiny.toml", SMALL)


@pytest.fixture
def own() -> Iterator[Any]:
    """Plugins of this file, enabled by name."""
    with installed() as found:
        yield lambda cls: [found.add(cls)]


def state() -> dict[str, Any]:
    """Everything global that a run could leave changed."""
    for thread in threading.enumerate():
        if thread.name == "forge-lock":  # was told to end, and may not have woken up yet
            thread.join(5)
    loggers = [logging.getLogger(name) for name in ("forge_train", "forge_train.progress")]
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "precision": torch.get_float32_matmul_precision(),
        "threads of torch": torch.get_num_threads(),
        "group": torch.distributed.is_initialized(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "logging": [(log.level, log.propagate, list(log.handlers)) for log in loggers],
        "environment": dict(os.environ),
        "threads": {thread.name for thread in threading.enumerate()},
        "gc": gc.isenabled(),
        "cwd": Path.cwd(),
        "streams": (sys.stdout, sys.stderr),
    }


def test_the_names_are_there_and_load_nothing_slow() -> None:
    code = "import sys, forge_train_tools; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
    assert set(forge_train_tools.__all__) <= set(dir(forge_train_tools))
    assert all(callable(getattr(forge_train_tools, name)) for name in forge_train_tools.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'fit'"):
        _ = forge_train_tools.fit


def test_trains_what_the_command_trains(forge: Forge) -> None:
    run = train("tiny.toml", {"train": {"steps": 4}, "lion.lr": 1e-3}, plugins=["lion"], name="here", quiet=True)
    forge("train", "tiny.toml", "-s", "train.steps=4", "-s", "lion.lr=1e-3", "-p", "lion", "--name", "there", "-q")
    assert (run.path, run.outcome, run.step) == (Path("runs/here"), "done", 4)
    assert run.losses == open_run("there").losses
    assert run.loss == run.metrics[-1]["loss"]
    assert run.config["lion.lr"] == 1e-3
    assert {"run_started", "checkpoint_saved", "run_finished"} <= {event["event"] for event in run.events}
    assert repr(run) == "RunFolder('runs/here': done, step 4)"


def test_a_name_continues_and_no_configuration_is_that_of_the_run_to_resume() -> None:
    first = train("tiny.toml", SMALL, name="first", quiet=True)
    further = train(set={"train.steps": 4}, resume=first.path, quiet=True)
    assert (further.path.resolve(), further.step) == (first.path.resolve(), 4)
    again = train("tiny.toml", {"train.steps": 4}, name="first", quiet=True)
    assert [event["event"] for event in again.events].count("run_started") == 2


def test_forge_set_counts_as_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_SET", "train.steps=1")
    assert train("tiny.toml", quiet=True).step == 1
    assert train("tiny.toml", SMALL, quiet=True).step == 2


def test_values_are_what_the_command_line_takes() -> None:
    values = {"a": {"b": True, "c": 1e-3}, "d.e": [1, "x"], "f.g": {"h": (0.5, 2)}, "i.j": Path("x"), "k.l": ""}
    assert list(as_assignments(values)) == [
        "a.b=true",
        "a.c=0.001",
        'd.e=[1, "x"]',
        'f.g={"h" = [0.5, 2]}',
        "i.j=x",
        "k.l=",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"set": {"train.stesp": 2}}, "did you mean 'steps'"),
        ({"set": {"train.steps": None}}, "set: train.steps: None is not a value of a configuration; leave the key out"),
        ({"set": {"text.path": " a"}}, "set: text.path: a text can't begin or end with a space"),
        ({"plugins": "lion"}, "plugins: expected a list of names, found 'lion'; write \\['lion'\\]"),
        ({"plugins": ["lino"]}, "Did you mean 'lion'"),
        ({"nproc": 0}, "nproc: expected at least 1 or 'auto', found 0"),
        ({"config": "quikstart"}, "Did you mean 'quickstart'"),
        ({"resume": "runs/none"}, "runs/none"),
    ],
)
def test_a_mistake_is_an_error_that_names_it(arguments: dict[str, Any], says: str) -> None:
    before = state()
    with pytest.raises(ConfigError, match=f"(?i){says}"):
        train(**{"config": "tiny.toml", **arguments})
    assert state() == before
    assert not list(Path("runs").glob("*"))


def test_a_divergence_is_an_error() -> None:
    with pytest.raises(DivergedError, match="loss is"):
        train("tiny.toml", {"train.steps": 20, "adamw.lr": 1e20, "train.clip_norm": 0, "log.every": 1}, quiet=True)
    assert open_run().outcome == "diverged"


class TestTheProcess:
    def test_is_as_before_and_a_second_run_repeats_the_first(self) -> None:
        random.seed(7)
        before = state()
        first = train("tiny.toml", {**SMALL, "run.deterministic": True}, quiet=True)
        assert state() == before
        random.random()
        torch.rand(3)
        assert train("tiny.toml", {**SMALL, "run.deterministic": True}, quiet=True).losses == first.losses

    def test_settings_of_the_caller_change_no_number_and_stay(self) -> None:
        plain = train("tiny.toml", SMALL, quiet=True)
        torch.set_default_dtype(torch.float64)
        try:
            with torch.no_grad():
                assert train("tiny.toml", SMALL, quiet=True).losses == plain.losses
                assert not torch.is_grad_enabled()
            assert torch.get_default_dtype() == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)

    @pytest.mark.parametrize("error", [ValueError, ForgeError, KeyboardInterrupt])
    def test_is_as_before_after_an_exception(
        self, own: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
    ) -> None:
        monkeypatch.setattr(Failing, "error", error)
        plugins = own(Failing)
        before = state()
        with pytest.raises(error, match="as asked"):
            train("tiny.toml", SMALL, plugins=plugins, quiet=True)
        assert state() == before
        assert open_run().outcome == "failed"
        assert train("tiny.toml", SMALL, quiet=True).outcome == "done"

    @pytest.mark.slow
    def test_holds_no_model_afterwards(self) -> None:
        train("tiny.toml", SMALL, quiet=True)
        gc.unfreeze()
        gc.collect()
        before = sum(isinstance(one, torch.nn.Parameter) for one in gc.get_objects())
        train("tiny.toml", SMALL, quiet=True)
        gc.collect()
        assert sum(isinstance(one, torch.nn.Parameter) for one in gc.get_objects()) <= before

    def test_an_interrupt_saves_and_returns_the_run(self, own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Interrupting, "signals", (signal.SIGINT,))
        plugins = own(Interrupting)
        before = state()
        run = train("tiny.toml", {"train.steps": 20}, plugins=plugins, quiet=True)
        assert (run.outcome, run.reason) == ("interrupted", "SIGINT")
        assert run.step < 20
        assert [path.name for path, _ in run.checkpoints()] == [f"step-{run.step:08}"]
        assert state() == before
        monkeypatch.setattr(Interrupting, "signals", ())
        assert train(resume=run.path, quiet=True).step == 20

    def test_a_second_interrupt_ends_the_run_but_not_an_interactive_session(
        self, own: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Interrupting, "signals", (signal.SIGINT, signal.SIGINT))
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        plugins = own(Interrupting)
        before = state()
        with pytest.raises(KeyboardInterrupt):
            train("tiny.toml", {"train.steps": 20}, plugins=plugins, quiet=True)
        assert state() == before

    def test_trains_in_a_thread_and_does_one_thing_at_a_time(self, own: Any) -> None:
        known = train("tiny.toml", SMALL, quiet=True).losses
        found: list[RunFolder] = []
        plugins, before = own(Waiting), state()
        thread = threading.Thread(target=lambda: found.append(train("tiny.toml", plugins=plugins, quiet=True)))
        thread.start()
        assert Waiting.there.wait(300)
        try:
            with pytest.raises(ForgeError, match="already at work in this process"):
                plan("tiny.toml")
        finally:
            Waiting.go.set()
            thread.join()
        assert found[0].losses[: len(known)] == known
        assert state() == before

    def test_does_one_thing_at_a_time_in_a_plugin_too(self, own: Any) -> None:
        with pytest.raises(ForgeError, match="already at work in this process"):
            train("tiny.toml", SMALL, plugins=own(Nested), quiet=True)


class Stream:
    """What some programs have for stdout: no terminal, no file."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


class TestTheScreen:
    @pytest.mark.slow
    def test_is_one_panel_in_the_cell_of_a_notebook(self, folder: Path) -> None:
        """In a real kernel, as Jupyter has it."""
        nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
        told = 'train("tiny.toml", {"train.steps": 4, "log.every": 1}, plugins=["console"], name="cell")'
        code = f"from forge_train_tools import train\n{told}\nprint('after')"
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
        kernel = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=kernel).execute()
        panel, after = notebook.cells[0].outputs[-2:]  # before, perhaps, that the text was tokenised
        assert panel.output_type == "display_data"
        assert (panel.data["text/html"].count("<pre"), panel.data["text/html"].count("4/4")) == (1, 1)
        assert "forge done" in panel.data["text/plain"]
        assert after.text == "after\n"

    def test_is_plain_lines_where_a_program_reads_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        out, err = Stream(), Stream()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        train("tiny.toml", {"train.steps": 4, "log.every": 2}, plugins=["console"], name="shown")
        assert not {"\r", "\x1b"} & {*out.text}
        assert [line.partition(" · ")[0] for line in out.text.splitlines() if "grad norm" in line] == [
            "step 2/4",
            "step 4/4",
        ]
        assert out.text.splitlines()[-1].startswith("done · 4 steps in ")
        assert err.text == ""
        out.text = ""
        train("tiny.toml", {"train.steps": 4, "log.every": 2}, plugins=["console"], name="shown")
        assert "the run had finished before: 4 steps" in out.text

    def test_is_empty_if_the_run_is_quiet(self, capfd: pytest.CaptureFixture[str]) -> None:
        train("tiny.toml", SMALL, plugins=["console"], quiet=True)
        assert capfd.readouterr() == ("", "")

    WARNS: dict[str, Any] = {"plugins": ["tp"], "quiet": True}

    def test_has_warnings(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(logging.root, "handlers", [])  # as in a program that has not configured logging
        run = train("tiny.toml", SMALL, **self.WARNS)
        assert capsys.readouterr().err.startswith("Warning: Plugin 'tp' does nothing here")
        assert "Plugin 'tp' does nothing here" in (run.path / "log" / "rank-0.log").read_text(encoding="utf-8")

    def test_leaves_warnings_to_the_logging_of_the_caller(
        self, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        train("tiny.toml", SMALL, **self.WARNS)
        assert capsys.readouterr().err == ""
        assert {record.levelname for record in caplog.records} == {"WARNING"}
        assert "Plugin 'tp' does nothing here" in caplog.text


@pytest.mark.slow
def test_plans() -> None:
    before = state()
    made = plan("tiny.toml", {"train.micro_batch": 1}, world=2)
    assert made.memory.peak is not None
    assert made.memory.peak > made.memory.parameters > 0
    assert made.meshes["dense"]["dp_shard"] == 2
    assert state() == before
    with pytest.raises(ConfigError, match="data sheet of a device 'h10'"):
        plan("tiny.toml", device="h10")


def test_verifies_against_a_setting_and_refuses_what_compares_nothing() -> None:
    before = state()
    verdict = verify("tiny.toml", against="train.micro_batch=1", steps=1)
    assert verdict.agree
    assert {"loss"} <= {check.name for check in verdict.checks}
    assert state() == before
    with pytest.raises(ConfigError, match="would compare one process with itself"):
        verify("tiny.toml", nproc=1)


@pytest.mark.slow
def test_verifies_and_trains_on_two_processes(capfd: pytest.CaptureFixture[str]) -> None:
    before = state()
    with warm.ranks():
        run = train("tiny.toml", {"train.steps": 2, "train.micro_batch": 1}, plugins=["console"], nproc=2, name="two")
    assert (run.outcome, run.step, run.environment["launcher"]) == ("done", 2, "forge")
    assert "step 2/2" in capfd.readouterr().out
    values = {"train.steps": 20, "adamw.lr": 1e20, "train.clip_norm": 0, "log.every": 1, "train.micro_batch": 1}
    with warm.ranks():
        assert verify("tiny.toml", {"train.micro_batch": 1}, nproc=2, steps=1).agree
        with pytest.raises(DivergedError, match="loss is"):
            train("tiny.toml", values, nproc=2, quiet=True)
    assert {**state(), "threads": 0} == {**before, "threads": 0}


class TestRuns:
    def test_are_opened_by_name_by_path_and_the_newest(self) -> None:
        run = train("tiny.toml", SMALL, name="first", quiet=True)
        assert open_run("first").path == open_run(run.path).path == open_run().path
        with pytest.raises(ConfigError, match="frist: there is no such run, here or in runs. Did you mean 'first'"):
            open_run("frist")

    def test_write_text(self, forge: Forge) -> None:
        run = train("tiny.toml", SMALL, name="first", quiet=True)
        before = state()
        model = open_model(run)
        text = model.generate("def ", tokens=8, temperature=0)
        assert state() == before
        assert (
            forge("generate", "runs/first", "--prompt", "def ", "--tokens", "8", "--temperature", "0").out
            == f"def {text}\n"
        )
        assert "".join(model.stream("def ", tokens=8, temperature=0)) == text
        assert model.generate("def ", tokens=8, temperature=0, stop=text[1:3]) == text[:1]
        assert (model.step, model.path) == (2, Path("runs/first/checkpoints/step-00000002"))
        with pytest.raises(ConfigError, match="temperature: expected"):
            model.generate(temperature=-1)
        with pytest.raises(
            ConfigError, match=r"^token: there is no such option of generation\. Did you mean 'tokens'\?"
        ):
            model.generate("a", token=1)
        with pytest.raises(ConfigError, match="chat: this model came without a tokenizer's folder"):
            model.generate("a", chat=True)

    def test_give_logits(self) -> None:
        model = open_model(train("tiny.toml", SMALL, quiet=True))
        logits = model.logits("def ")
        assert logits.shape == (4, next(iter(model.module.parameters())).shape[0])
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, model.logits(model.tokenizer.encode("def ")))
        likeliest = model.tokenizer.decode([int(logits[-1][: model.tokenizer.vocabulary].argmax())])
        assert model.generate("def ", tokens=1, temperature=0) in (likeliest, "")
        with pytest.raises(ConfigError, match="expected at least one token"):
            model.logits("")
        with pytest.raises(ConfigError, match="there is no token 99999"):
            model.logits([99999])

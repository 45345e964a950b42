"""A run from its start to its end: resuming, requests to stop, save and roll back, signals, divergence, failures."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from crossed import few
from forge_cli import environment, start
from forge_train import (
    ConfigError,
    DivergedError,
    Finished,
    ForgeError,
    Plugin,
    PluginError,
    StepResult,
    Update,
    hookimpl,
    section,
)
from forge_train.checkpoint import checkpoint
from forge_train.checkpoint.checkpoint import check, found
from forge_train_tools.testing import TinyRun

ALL = (toys.Noise, toys.Average)
EVERYTHING = {"train.evaluate_every": 2, "checkpoint.every": 2, "checkpoint.keep": 3}


def evaluations(run: TinyRun) -> list[tuple[Any, Any]]:
    """Of every step the last, since those after a checkpoint are repeated."""
    return sorted({e["step"]: e["loss"] for e in run.events if e["event"] == "evaluation"}.items())


def equal(one: TinyRun, other: TinyRun) -> None:
    assert one.numbers == other.numbers
    assert evaluations(one) == evaluations(other)
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name


# -- resuming -------------------------------------------------------------------------------------


@pytest.mark.unit
@pytest.mark.parametrize(
    ("stop", "optimizer"),
    few(
        [(1, "adamw"), (2, "lion"), (3, "adamw"), (3, "lion"), (6, "adamw")],
        [(1, "adamw"), (3, "lion"), (6, "adamw")],
    ),
)
def test_a_stopped_run_that_goes_on_is_the_uninterrupted_one(tmp_path: Path, stop: int, optimizer: str) -> None:
    config = {**EVERYTHING, "defaults.optimizer": optimizer, "cosine.warmup": 2}
    through = toys.run(tmp_path, *ALL, name="through", steps=6, config=config)
    stopped = toys.run(tmp_path, *ALL, name="stopped", steps=6, config=config, stop_at=stop)
    assert (stopped.finished.outcome, stopped.finished.code, stopped.finished.step) == ("interrupted", 75, stop)
    resumed = toys.run(tmp_path, *ALL, name="stopped", steps=6, config=config)
    assert resumed.finished.outcome == "done"
    assert resumed.finished.loss == through.finished.loss
    assert resumed.run == stopped.run
    equal(resumed, through)


@pytest.mark.unit
def test_damaged_records_do_not_keep_a_run_from_going_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A power cut may leave anything in a file that was not flushed to disk; the checkpoint was."""
    config = {**EVERYTHING, "checkpoint.every": 2}
    run = toys.run(tmp_path, *ALL, name="run", steps=6, config=config, stop_at=4).run
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([lines[0], b"\xff" + lines[1], b"\0" * 40 + b"\n", *lines[2:]]))
    (run / "outcome.json").write_bytes(b"\0" * 10)
    resumed = toys.run(tmp_path, *ALL, name="run", steps=6, config=config)
    assert [line["step"] for line in resumed.metrics] == [1, 3, 4, 5, 6]
    for said in ("metrics.jsonl:2 is damaged, and is left out", "metrics.jsonl:3 is", "outcome.json is damaged"):
        assert said in caplog.text


@pytest.mark.unit
def test_metrics_past_the_checkpoint_are_dropped_and_written_again(tmp_path: Path) -> None:
    class Dies(Plugin):
        @hookimpl
        def on_step(self, step: Any) -> None:
            if step.step == 5 and first:
                raise RuntimeError("power cut")

    first = True
    through = toys.run(tmp_path, Dies, *ALL, name="through", steps=4, config=EVERYTHING)
    with pytest.raises(RuntimeError, match="power cut"):
        toys.run(tmp_path, Dies, *ALL, name="dies", steps=6, config=EVERYTHING)
    lines = (tmp_path / "dies" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    first = False
    through = toys.run(tmp_path, Dies, *ALL, name="whole", steps=6, config=EVERYTHING)
    resumed = toys.run(tmp_path, Dies, *ALL, name="dies", steps=6, config=EVERYTHING)
    equal(resumed, through)
    assert [event["step"] for event in resumed.events if event["event"] == "resumed"] == [4]


@pytest.mark.unit
def test_resuming_from_a_checkpoint_is_a_new_run_and_leaves_the_old_one_alone(tmp_path: Path) -> None:
    old = toys.run(tmp_path, *ALL, name="old", steps=6, config=EVERYTHING)
    before = {file: file.read_bytes() for file in old.run.rglob("*") if file.is_file()}
    path = old.run / "checkpoints" / "step-00000004"
    new = toys.run(tmp_path, *ALL, name="new", steps=6, config=EVERYTHING, resume=str(path))
    assert new.run == tmp_path / "new"
    assert new.numbers == old.numbers[4:]
    assert {file: file.read_bytes() for file in old.run.rglob("*") if file.is_file()} == before
    assert new.events[0]["checkpoint"] == str(path)


@pytest.mark.unit
def test_a_new_run_that_would_have_nothing_to_do_is_refused(tmp_path: Path) -> None:
    path = toys.run(tmp_path, name="old", steps=4).run / "checkpoints" / "step-00000004"
    for steps in (3, 4):
        with pytest.raises(ConfigError, match=r"step 4.*train\.steps"):
            toys.run(tmp_path, name="new", steps=steps, resume=str(path))
    assert not (tmp_path / "new").exists()


@pytest.mark.unit
def test_a_run_without_a_whole_checkpoint_starts_over_in_its_folder(tmp_path: Path) -> None:
    through = toys.run(tmp_path, *ALL, name="through", steps=4)

    class Dies(Plugin):
        @hookimpl
        def on_log(self, record: Any) -> None:
            if record.step == 3:
                raise ForgeError("stop here")

    with pytest.raises(ForgeError, match="stop here"):
        toys.run(tmp_path, *ALL, Dies, name="dies", steps=4)
    again = toys.run(tmp_path, *ALL, name="dies", steps=4, resume=str(tmp_path / "dies"))
    equal(again, through)
    assert [event["event"] for event in again.events].count("run_started") == 1


@pytest.mark.unit
def test_a_finished_run_says_so(tmp_path: Path) -> None:
    run = toys.run(tmp_path, name="a")
    before = {file: file.read_bytes() for file in run.run.rglob("*") if file.is_file()}
    with pytest.raises(ConfigError, match="the run had finished before"):  # run_forge has no model to show
        toys.run(tmp_path, name="a")
    assert {file: file.read_bytes() for file in run.run.rglob("*") if file.is_file()} == before
    longer = toys.run(tmp_path, name="a", steps=6)
    assert [line["step"] for line in longer.metrics] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match=r"is of step 6, and the run would end at step 4 \(train\.steps\)"):
        toys.run(tmp_path, name="a", steps=4)


@pytest.mark.unit
def test_a_run_interrupted_at_its_last_step_is_done_when_it_goes_on(tmp_path: Path) -> None:
    stopped = toys.run(tmp_path, name="a", stop_at=4)
    assert stopped.finished.outcome == "interrupted"
    done = toys.run(tmp_path, name="a")
    assert (done.finished.outcome, done.finished.loss) == ("done", stopped.losses[-1])


@pytest.mark.unit
def test_what_differs_is_spelled_out_and_what_is_allowed_may(tmp_path: Path) -> None:
    config = {"adamw.lr": 0.01, "cosine.floor": 1.0, "checkpoint.every": 2}
    toys.run(tmp_path, toys.Average, name="a", steps=4, config=config, stop_at=2)
    changed = {**config, "adamw.lr": 0.5, "toy_data.mask": False, "log.every": 2}
    with pytest.raises(ConfigError) as caught:
        toys.run(tmp_path, name="a", steps=4, config=changed)
    assert str(caught.value).splitlines()[1:] == [
        "  average: plugin no longer enabled",
        "  adamw.lr: 0.01 in the checkpoint, 0.5 now",
        "  toy_data.mask: True in the checkpoint, False now",
        (
            'If that is meant: checkpoint.allow_changes = ["average", "adamw.lr", "toy_data.mask"]; '
            "else use --resume never."
        ),
    ]
    allowed = {**changed, "checkpoint.allow_changes": ["average", "adamw", "toy_data.mask"]}
    resumed = toys.run(tmp_path, name="a", steps=4, config=allowed)
    assert [(line["step"], line["lr"]) for line in resumed.metrics] == [(1, 0.01), (2, 0.01), (4, 0.5)]
    assert {group["lr"] for group in resumed.optimizer.param_groups} == {0.5}
    (event,) = [event for event in resumed.events if event["event"] == "resumed"]
    assert len(event["changes"]) == 3


class Nested(Plugin):
    """Has an option with keys of its own."""

    api = (1, 0)

    @section
    class Config:
        table: Mapping[str, int] = field(default_factory=dict)

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        pass


@pytest.mark.unit
@pytest.mark.parametrize(("key", "value"), [("cosine.floor", 0.5), ("nested.table", {"a": 1}), ("nested.table.a", 1)])
def test_an_option_that_the_checkpoint_did_not_know_is_a_difference_where_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any
) -> None:
    """A newer version has more options, and does by default what the older one did."""
    option = ".".join(key.split(".")[:2])
    toys.run(tmp_path, Nested, name="a", steps=4, stop_at=2)
    read = checkpoint.read_state

    def older(path: Path) -> Any:
        state = dict(read(path))
        state["config"] = {key: value for key, value in state["config"].items() if key != option}
        return state

    monkeypatch.setattr(checkpoint, "read_state", older)
    now = {"cosine.floor": 0.5, "nested.table": {"a": 1}}[option]
    with pytest.raises(ConfigError, match=re.escape(f"{option}: None in the checkpoint, {now} now")):
        toys.run(tmp_path, Nested, name="a", steps=4, config={key: value})
    assert toys.run(tmp_path, Nested, name="a", steps=4).finished.step == 4


@pytest.mark.unit
@pytest.mark.parametrize("name", ["nobody", "nobody.lr"])
def test_changes_are_allowed_of_what_there_is(tmp_path: Path, name: str) -> None:
    """Neither this run nor the checkpoint knows it, whether there is a checkpoint or not."""
    config = {"checkpoint.allow_changes": [name]}
    with pytest.raises(ConfigError, match=rf"checkpoint\.allow_changes: there is no .* '{name}'\."):
        toys.run(tmp_path, config=config, name="a")
    first = toys.run(tmp_path, name="a", steps=2)
    with pytest.raises(ConfigError, match=f"there is no .* '{name}'"):
        toys.run(tmp_path, config=config, resume=str(first.run), steps=4)


@pytest.mark.unit
def test_another_optimizer_goes_on_with_its_own_rate_where_the_schedule_is(tmp_path: Path) -> None:
    config = {"adamw.lr": 0.01, "cosine.floor": 0.0, "checkpoint.every": 2}
    one = toys.run(tmp_path, name="a", steps=4, config=config, stop_at=2)
    allowed = {"cosine.floor": 0.0, "lion.lr": 0.02, "checkpoint.allow_changes": ["adamw", "lion"]}
    other = toys.run(tmp_path, "lion", name="a", steps=4, config=allowed)
    through = toys.run(tmp_path, name="b", steps=4, config=config)
    assert one.numbers == other.numbers[:2]
    assert [line["lr"] for line in other.metrics[2:]] == pytest.approx([2 * line["lr"] for line in through.metrics[2:]])


@pytest.mark.unit
def test_weights_of_a_checkpoint_start_another_run(tmp_path: Path) -> None:
    old = toys.run(tmp_path, name="old", steps=2)
    for path in (old.run, old.run / "checkpoints" / "step-00000002"):
        frozen = type("Never", (Plugin,), {"on_gradients": hookimpl(lambda self, update: update.veto("x"))})
        new = toys.run(tmp_path, frozen, steps=1, config={"train.init_from": str(path)})
        assert new.metrics[0]["step"] == 1
        for name, value in new.model.state_dict().items():
            assert torch.equal(value, old.model.state_dict()[name])


@pytest.mark.unit
def test_observers_may_come_and_go(tmp_path: Path) -> None:
    class Watches(Plugin):
        @hookimpl
        def on_log(self, record: Any) -> None: ...

    toys.run(tmp_path, name="a", steps=4, stop_at=2)
    assert toys.run(tmp_path, Watches, name="a", steps=4).finished.outcome == "done"


@pytest.mark.unit
def test_a_refused_run_is_left_as_it_was(tmp_path: Path) -> None:
    run = toys.run(tmp_path, name="a", steps=4, stop_at=2)
    before = {file: file.read_bytes() for file in run.run.rglob("*") if file.is_file()}
    with pytest.raises(ConfigError, match="this run differs"):
        toys.run(tmp_path, name="a", steps=4, config={"run.seed": 9})
    assert {file: file.read_bytes() for file in run.run.rglob("*") if file.is_file()} == before


@pytest.mark.unit
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize(("hook", "error"), [("on_start", ConfigError), ("on_gradients", LookupError)])
def test_a_run_that_fails_before_its_next_step_goes_on_as_before(
    tmp_path: Path, hook: str, error: type[Exception], saved: bool
) -> None:
    def fail(self: Plugin) -> None:
        raise error("no")

    run = toys.run(tmp_path, name="a", steps=4, stop_at=2, config={"checkpoint.every": 2}).run
    if not saved:
        shutil.rmtree(run / "checkpoints")
    left = ["config.toml", "plugins.json", *(["outcome.json"] if saved and error is ConfigError else [])]
    before = {name: (run / name).read_bytes() for name in left}
    changed = {"log.every": 3, "checkpoint.allow_changes": ["fails"]}
    with pytest.raises(error):
        toys.run(tmp_path, type("Fails", (Plugin,), {hook: hookimpl(fail)}), name="a", steps=4, config=changed)
    assert {name: (run / name).read_bytes() for name in left} == before
    assert toys.run(tmp_path, name="a", steps=4, config={"log.every": 2}).finished.outcome == "done"
    assert "every = 2" in (run / "config.toml").read_text(encoding="utf-8").partition("[log]")[2]


# -- requests -------------------------------------------------------------------------------------


@pytest.mark.unit
def test_stop_saves_and_ends_with_the_first_reason(tmp_path: Path) -> None:
    def stop(control: Any) -> None:
        control.stop("enough", 3)
        control.stop("another", 4)

    run = toys.run(tmp_path, toys.asks(2, stop), config={"log.every": 3})
    assert (run.finished.outcome, run.finished.code, run.finished.reason) == ("interrupted", 3, "enough")
    assert [saved.step for saved in found(run.run / "checkpoints")] == [2]
    assert [event["event"] for event in run.events][-2:] == ["interrupted", "run_finished"]
    assert run.finished.loss == toys.run(tmp_path, steps=2, config={"cosine.floor": 0.5}).losses[-1]


@pytest.mark.unit
def test_save_saves_once(tmp_path: Path) -> None:
    run = toys.run(tmp_path, toys.asks(2, lambda control: control.save()), config={"checkpoint.every": 2})
    assert [event["step"] for event in run.events if event["event"] == "checkpoint_saved"] == [2, 4]
    run = toys.run(tmp_path, toys.asks(3, lambda control: control.save()), config={"checkpoint.keep": 9})
    assert [saved.step for saved in found(run.run / "checkpoints")] == [4, 3]


class Ranges(Plugin):
    @hookimpl
    def on_start(self) -> None:
        self.seen: list[Any] = []

    @hookimpl
    def on_step(self, step: Any) -> None:
        self.seen.append((step.step, step.data_range[0] // 4))


@pytest.mark.unit
@pytest.mark.parametrize("skip", [0, 1, 3])
def test_roll_back_goes_to_the_newest_checkpoint_and_leaves_data_out(tmp_path: Path, skip: int) -> None:
    config = {"checkpoint.every": 2}
    back = toys.asks(3, lambda control: control.roll_back("a spike", skip))
    run = toys.run(tmp_path, back, Ranges, *ALL, steps=5, config=config)
    assert run.plugin("ranges").seen == [(1, 0), (2, 1), (3, 2), (3, 2 + skip), (4, 3 + skip), (5, 4 + skip)]
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5]
    kinds = [(event["event"], event["step"]) for event in run.events]
    assert kinds[kinds.index(("anomaly", 3)) + 1] == ("resumed", 2)
    if not skip:
        equal(run, toys.run(tmp_path, *ALL, steps=5, config=config))
    # and one that is stopped after it continues with the data it would have had
    stopped = toys.run(tmp_path, back, Ranges, *ALL, steps=5, config=config, name="b", stop_at=4)
    assert stopped.finished.step == 4
    resumed = toys.run(
        tmp_path, Ranges, *ALL, steps=5, config={**config, "checkpoint.allow_changes": ["asks_once"]}, name="b"
    )
    assert resumed.numbers == run.numbers


@pytest.mark.unit
def test_roll_back_and_stop_together_do_not_save_what_was_rolled_back(tmp_path: Path) -> None:
    def both(control: Any) -> None:
        control.stop("enough")
        control.roll_back("a spike")

    run = toys.run(tmp_path, toys.asks(3, both), config={"checkpoint.every": 2}, steps=6)
    assert (run.finished.step, run.finished.code) == (2, 75)
    assert [saved.step for saved in found(run.run / "checkpoints")] == [2]


@pytest.mark.unit
def test_roll_back_before_a_step_removes_what_came_after_it(tmp_path: Path) -> None:
    """And leaves data out where it lay; what all processes agree on is done before the step is logged or saved."""

    def back(control: Any) -> None:
        control.roll_back("a spike", before=4, leave_out=[(16, 20), (8, 12)], agreed=True)
        control.save()

    config = {"checkpoint.every": 2, "checkpoint.keep": 9}
    run = toys.run(tmp_path, toys.asks(6, back), Ranges, steps=7, config=config)
    assert run.plugin("ranges").seen[6:] == [(3, 3), (4, 5), (5, 6), (6, 7), (7, 8)]
    told = [(event["event"], event["step"]) for event in run.events]
    first = told.index(("anomaly", 6))
    assert told[first + 1 : first + 3] == [("checkpoint_pruned", 4), ("resumed", 2)]
    assert ("checkpoint_saved", 6) not in told[:first], "step 6 was not saved before"
    assert [saved.step for saved in found(run.run / "checkpoints")] == [7, 6, 4, 3, 2], "nor was the request lost"
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.unit
def test_roll_back_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        DivergedError, match=r"A plugin asked to roll back \(a spike\), but the run has no checkpoint yet"
    ):
        toys.run(tmp_path, toys.asks(2, lambda control: control.roll_back("a spike")))
    with pytest.raises(ConfigError, match="skip must be at least 0, found -1"):
        toys.run(tmp_path, toys.asks(2, lambda control: control.roll_back("a spike", -1)))


# -- divergence and failure -----------------------------------------------------------------------


class Poison(Plugin):
    """Makes the third step's gradients infinite."""

    api = (1, 0)

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        if update.step == 3:
            update.scale(float("nan"))


@pytest.mark.unit
def test_a_diverged_run_says_so_and_keeps_its_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(DivergedError) as caught:
        toys.run(tmp_path, Poison, name="a", config={"checkpoint.every": 2})
    assert caught.value.code == 3
    assert "grad_norm is nan at step 3" in str(caught.value)
    assert [saved.step for saved in found(tmp_path / "a" / "checkpoints")] == [2]
    assert json.loads((tmp_path / "a" / "outcome.json").read_text(encoding="utf-8"))["outcome"] == "diverged"
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [event["event"] for event in events][-2:] == ["anomaly", "run_finished"]


@pytest.mark.unit
def test_weights_that_diverged_are_never_saved_however_seldom_is_looked(tmp_path: Path) -> None:
    with pytest.raises(DivergedError):
        toys.run(tmp_path, Poison, name="a", config={"log.every": 100, "checkpoint.every": 1, "checkpoint.keep": 1})
    (kept,) = found(tmp_path / "a" / "checkpoints")
    assert kept.step == 2


@pytest.mark.unit
def test_a_plugin_that_fails_ends_the_run_and_is_told_of(tmp_path: Path) -> None:
    told: list[Finished] = []

    class Bad(Plugin):
        @hookimpl
        def on_step(self, step: Any) -> None:
            raise LookupError("not here")

    class Listens(Plugin):
        @hookimpl
        def on_end(self, finished: Finished) -> None:
            told.append(finished)

    with pytest.raises(LookupError, match="not here") as caught:
        toys.run(tmp_path, Bad, Listens, name="a")
    (finished,) = told
    assert finished.error is caught.value
    assert (finished.outcome, finished.code, finished.reason) == ("failed", 1, "LookupError: not here")
    assert caught.value.__notes__ == ["in plugin 'bad' (under-test 0), hook on_step"]
    assert json.loads((tmp_path / "a" / "outcome.json").read_text(encoding="utf-8"))["outcome"] == "failed"


class First(Plugin):
    """Fails before anything else does."""

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        raise LookupError("the first")


class NoRouteError(ForgeError):
    code = 4
    type = "communication"


@pytest.mark.unit
def test_a_plugin_explains_an_error_in_its_own_words(tmp_path: Path) -> None:
    seen: list[tuple[int, BaseException | None, bool, bool, Path | None]] = []
    told: list[BaseException | None] = []
    recorded: list[str] = []

    class Bad(Plugin):
        @hookimpl
        def on_step(self, step: StepResult) -> None:
            if step.step == 3:
                raise OSError("errno 113")

    class Explains(Plugin):
        @hookimpl
        def on_end(self, finished: Finished) -> None:
            made = finished.model is not None, finished.optimizer is not None
            seen.append((finished.step, finished.error, *made, finished.log))
            recorded.append((finished.run / "outcome.json").read_text(encoding="utf-8"))
            if isinstance(finished.error, OSError):
                finished.explain(NoRouteError("The license server can't be reached."))

    class Told(Plugin):
        @hookimpl
        def on_end(self, finished: Finished) -> None:
            told.append(finished.error)
            finished.explain(ForgeError("The second explanation."))

    with pytest.raises(NoRouteError, match="license server") as caught:
        toys.run(tmp_path, Bad, Explains, Told, name="a")
    assert told == [caught.value]
    assert isinstance(caught.value.__cause__, OSError)
    assert "errno 113" in recorded[0], "a plugin may wait for long before it explains anything"
    ((*failed, file),) = seen
    assert failed == [3, caught.value.__cause__, True, True]
    assert file is not None
    assert "errno 113" in file.read_text(encoding="utf-8")
    ended = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [one["reason"] for one in ended if one["event"] == "run_finished"] == [
        "The license server can't be reached."
    ]
    outcome = json.loads((tmp_path / "a" / "outcome.json").read_text(encoding="utf-8"))
    assert (outcome["outcome"], outcome["code"], outcome["error"]["type"]) == ("failed", 4, "communication")
    assert outcome["error"]["message"] == "The license server can't be reached."


@pytest.mark.unit
def test_a_plugin_that_fails_to_explain_an_error_hides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Explains(Plugin):
        @hookimpl
        def on_end(self, finished: Finished) -> None:
            raise KeyError("the second")

    with pytest.raises(LookupError, match="the first"):
        toys.run(tmp_path, First, Explains)
    assert "failed in on_end and is left out from here on: KeyError: 'the second'" in caplog.text


@pytest.mark.unit
def test_a_plugin_that_fails_at_the_end_of_a_failed_run_keeps_no_other_from_closing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []

    class Second(First):
        @hookimpl
        def on_end(self, finished: Finished) -> None:
            raise KeyError("the second")

    class Closes(Plugin):
        @hookimpl
        def on_end(self, finished: Finished) -> None:
            closed.append(finished.outcome)

    with pytest.raises(LookupError, match="the first"):
        toys.run(tmp_path, Second, Closes)
    assert closed == ["failed"]
    assert "Nor could it be recorded how the run ended: KeyError: 'the second'" in caplog.text


@pytest.mark.unit
def test_a_plugin_that_fails_at_the_end_of_a_good_run_has_nobody_told_twice(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []

    class Acts(Plugin):
        @hookimpl
        def on_step(self, step: StepResult) -> None: ...

        @hookimpl
        def on_end(self, finished: Finished) -> None:
            told.append((type(self).__name__, finished.outcome))
            if isinstance(self, Fails):
                raise KeyError("at the end")

    class Fails(Acts): ...

    class Later(Acts): ...

    with pytest.raises(KeyError, match="at the end"):
        toys.run(tmp_path, Acts, Fails, Later, name="a")
    assert told == [("Acts", "done"), ("Fails", "done"), ("Later", "failed")]
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [one["outcome"] for one in events if one["event"] == "run_finished"] == ["failed"]


@pytest.mark.unit
def test_only_an_error_can_be_explained(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="the run is done; only an error can be explained"):
        Finished("done", 1, None, 0, tmp_path).explain(ForgeError("no"))


@pytest.mark.unit
def test_no_error_explains_itself_or_what_it_has_caused(tmp_path: Path) -> None:
    first, error = ForgeError("the first"), ForgeError("the second")
    error.__cause__ = first
    finished = Finished("failed", 1, None, 1, tmp_path, error=error)
    for one in (error, first):
        with pytest.raises(PluginError, match="itself led to the error that ended the run; pass a new error"):
            finished.explain(one)
    assert (finished.error, finished.explained, error.__cause__, first.__cause__) == (error, False, first, None)
    finished.explain(another := ForgeError("the third"))
    finished.explain(another)  # the first stands
    assert another.__cause__ is error


@pytest.mark.unit
def test_what_fails_while_a_failure_is_recorded_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "forge_train.loop.describe.Run.end", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.raises(LookupError, match="the first"):
        toys.run(tmp_path, First)
    assert "Nor could it be recorded how the run ended: OSError: [Errno 28] No space left" in caplog.text


@pytest.mark.unit
def test_a_failing_observer_costs_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Logger(Plugin):
        @hookimpl
        def on_log(self, record: Any) -> None:
            raise OSError("tracker is down")

        @hookimpl
        def on_checkpoint(self, event: Any) -> None:
            raise OSError("tracker is down")

    run = toys.run(tmp_path, Logger, *ALL, name="a")
    assert run.numbers == toys.run(tmp_path, *ALL, name="b").numbers
    assert caplog.text.count("is left out from here on") == 1


@pytest.mark.unit
def test_a_mistake_found_while_composing_removes_the_new_folder(tmp_path: Path) -> None:
    class Cant(Plugin):
        @hookimpl
        def parallelize(self, job: Any) -> Any:
            raise ConfigError("it can't be")

    with pytest.raises(ConfigError, match="it can't be"):
        toys.run(tmp_path, Cant, name="a")
    assert not (tmp_path / "a").exists()
    run = toys.run(tmp_path, name="b", steps=4, stop_at=2)
    with pytest.raises(ConfigError, match="it can't be"):
        toys.run(tmp_path, Cant, name="b", steps=4, config={"checkpoint.allow_changes": ["cant"]})
    assert found(run.run / "checkpoints")


@pytest.mark.unit
def test_plugins_see_what_happens_to_checkpoints(tmp_path: Path) -> None:
    class Sees(Plugin):
        @hookimpl
        def on_start(self) -> None:
            self.seen: list[Any] = []

        @hookimpl
        def on_checkpoint(self, event: Any) -> None:
            whole = event.kind in ("saved", "loaded") and not check(event.path)
            self.seen.append((event.kind, event.step, event.path.name[-1], whole))

    config = {"checkpoint.every": 1, "checkpoint.keep": 1}
    run = toys.run(tmp_path, Sees, steps=2, name="a", config=config)
    assert run.plugin("sees").seen == [
        *(("saving", 1, "1", False), ("saved", 1, "1", True)),
        *(("saving", 2, "2", False), ("saved", 2, "2", True), ("pruned", 1, "1", False)),
    ]
    assert toys.run(tmp_path, Sees, steps=3, name="a", config=config).plugin("sees").seen[0] == ("loaded", 2, "2", True)


@pytest.mark.unit
def test_deterministic_kernels_on_demand(tmp_path: Path) -> None:
    class Sees(Plugin):
        @hookimpl
        def on_start(self) -> None:
            self.on = torch.are_deterministic_algorithms_enabled()

    assert toys.run(tmp_path, Sees, steps=1, config={"run.deterministic": True}).plugin("sees").on
    assert not toys.run(tmp_path, Sees, steps=1).plugin("sees").on


# -- signals --------------------------------------------------------------------------------------


class Slow(Plugin):
    """Ends no step before it may, and shows where it is."""

    api = (1, 0)

    @hookimpl
    def around(self, span: str, job: Any) -> Any:
        @contextmanager
        def slow() -> Iterator[None]:
            yield
            (job.run.dir / "alive").touch()
            while not (job.run.dir / "go").exists():
                time.sleep(0.01)

        return slow if span == "step" else None


def started(folder: Path, *arguments: object) -> Any:
    """A slow run in a process of its own, once it trains."""
    file = toys.write_config(folder, "test_engine:Slow", **{"train.steps": 1000})
    env = environment(PYTHONPATH=f"{Path(toys.__file__).parent}:{Path(__file__).parent}")
    process = start("train", file, "--json", "--name", "a", "--run-dir", folder, *arguments, preloaded=True, env=env)
    deadline = time.monotonic() + 600
    while not (folder / "a" / "alive").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.unit
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    run = toys.run(tmp_path, toys.asks(2, lambda control: signal.raise_signal(number)))
    assert (run.finished.outcome, run.finished.code, run.finished.reason) == ("interrupted", 75, number.name)
    assert [saved.step for saved in found(run.run / "checkpoints")] == [2]
    assert signal.getsignal(number) is before


@pytest.mark.slow
@pytest.mark.e2e
def test_a_signal_from_outside_ends_with_75(tmp_path: Path) -> None:
    process = started(tmp_path)
    process.send_signal(signal.SIGTERM)
    heard = hears_the_first(process)
    (tmp_path / "a" / "go").touch()
    out, err = process.communicate(timeout=600)
    assert process.returncode == 75, err
    result = json.loads(out)
    assert result["outcome"] == "interrupted"
    (saved,) = found(tmp_path / "a" / "checkpoints")
    assert saved.step == result["step"]
    assert check(saved.path, contents=True) == ""
    assert "SIGTERM: finishing the step and saving; a second signal ends at once." in heard


def hears_the_first(process: Any) -> str:
    """Waits until the run has said that it heard the first signal; what it said."""
    said = ""
    for line in process.stderr:
        said += line
        if "a second signal ends at once" in line:
            break
    return said


@pytest.mark.slow
@pytest.mark.e2e
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    process = started(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert hears_the_first(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode == -signal.SIGINT  # 128 + its number, as a shell shows it
    assert not (tmp_path / "a" / "outcome.json").exists()  # the step was not even finished
    assert not [path for path in (tmp_path / "a" / "checkpoints").glob("step-*") if check(path)]


@pytest.mark.unit
def test_a_state_that_can_not_be_saved_is_told_after_the_first_step(tmp_path: Path) -> None:
    class Hoards(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.state[self.param_groups[0]["params"][0]]["seen"] = {1, 2}

    class Sets(Plugin):
        @hookimpl
        def optimizer(self, model: Any) -> torch.optim.Optimizer:
            return Hoards(model.parameters(), lr=0.1)

    with pytest.raises(PluginError, match=r"state 'optimizer\.state\..*\.seen' holds a set; only tensors and JSON"):
        toys.run(tmp_path, Sets, name="run", steps=4)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.unit
@pytest.mark.parametrize("step", [0, 2])
def test_a_mistake_found_in_training_removes_nothing_that_was_trained(tmp_path: Path, step: int) -> None:
    class Refuses(Plugin):
        @hookimpl
        def on_gradients(self, update: Any) -> None:
            if update.step > step:
                raise ConfigError("this batch is nothing for me.")

    with pytest.raises(ConfigError, match="nothing for me"):
        toys.run(tmp_path, Refuses, name="run", steps=4, config={"log.every": 1})
    run = tmp_path / "run"
    assert run.exists() == (step > 0)
    if step:
        assert len((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == step
        assert json.loads((run / "outcome.json").read_text(encoding="utf-8"))["outcome"] == "failed"

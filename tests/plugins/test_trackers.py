"""Trackers: each against its own library's files, and what a bad one costs a run."""

from __future__ import annotations

import csv
import errno
import importlib.util
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from forge_train import Bins, ConfigError, Metric, Plugin, PluginError, hookimpl
from forge_train_kit.tracking import Tracker
from forge_train_tools.testing import RunForge, TinyRun

STEPS = 4
SETTINGS = {"train.evaluate_every": 2, "train.evaluate_batches": 1, "checkpoint.every": 1}


class Spread(Plugin):
    """Has a histogram, and something to say at the end."""

    api = (1, 0)

    @hookimpl
    def metrics(self, job: Any) -> dict[str, Metric]:
        from forge_train_kit.metrics import Histogram

        self.losses = Histogram(0, 8, bins=4)
        return {"losses": self.losses}

    @hookimpl
    def on_step(self, step: Any) -> None:
        self.losses.update(step.loss)

    @hookimpl
    def on_end(self, finished: Any) -> None:
        finished.say("A word", "The end.")


def library(name: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed here")


@pytest.fixture
def tracked(run_forge: RunForge, tmp_path: Path) -> Any:
    def run(plugin: str, **config: Any) -> TinyRun:
        """A run that is stopped in the middle, and resumed."""
        settings = {**SETTINGS, **config}
        for stop in (2, None):
            done = run_forge([plugin, Spread], settings, steps=STEPS, stop_at=stop, name="tracked", folder=tmp_path)
        return done

    return run


def losses(run: TinyRun) -> dict[int, float]:
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    return {line["step"]: line["loss"] for line in run.metrics}


def held_out(run: TinyRun) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in run.events if event["event"] == "evaluation"}


def test_csv(tracked: Any) -> None:
    run = tracked("csv")
    with (run.run / "csv" / "metrics.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert {int(row["step"]): float(row["loss"]) for row in rows} == losses(run)
    with (run.run / "csv" / "evaluations.csv").open() as lines:
        assert {int(row["step"]): float(row["evaluation.loss"]) for row in csv.DictReader(lines)} == held_out(run)


def test_a_column_that_comes_later_and_rows_that_are_taken_back(tmp_path: Path) -> None:
    from forge_train_plugins.observers.csv import _Table

    table = _Table(tmp_path / "table.csv")
    table.add({"step": 1, "a": 0.5})
    table.add({"step": 2, "b": 3.0})
    again = _Table(tmp_path / "table.csv")
    again.add({"step": 3, "a": 1.0, "b": 2.0})
    assert (tmp_path / "table.csv").read_text().split() == ["step,a,b", "1,0.5,", "2,,3.0", "3,1.0,2.0"]
    again.cut(1)
    again.add({"step": 2, "a": 4.0})
    assert (tmp_path / "table.csv").read_text().split() == ["step,a,b", "1,0.5,", "2,4.0,"]


def test_tensorboard(tracked: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.api_pb2 import Status

    run = tracked("tensorboard")
    found = EventAccumulator(str(run.run / "tensorboard"), {"histograms": 0}).Reload()
    assert {one.step: one.value for one in found.Scalars("loss")} == pytest.approx(losses(run), rel=1e-6)
    assert {one.step: one.value for one in found.Scalars("evaluation/loss")} == pytest.approx(held_out(run), rel=1e-6)
    assert "step" not in found.Tags()["scalars"]
    histograms = found.Histograms("spread/losses")
    assert [one.step for one in histograms] == [1, 2, 3, 4]
    assert sum(histograms[0].histogram_value.bucket) == 1
    *_, text = found.Tensors("A word")
    assert text.tensor_proto.string_val[0] == b"The end."
    content = found.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    start = metadata.parse_session_start_info_plugin_data(content)
    assert start.hparams["train.steps"].number_value == STEPS
    events = [one for file in sorted((run.run / "tensorboard").iterdir()) for one in EventFileLoader(str(file)).Load()]
    values = [one for event in events for one in event.summary.value if one.tag == metadata.SESSION_END_INFO_TAG]
    ends = [metadata.parse_session_end_info_plugin_data(one.metadata.plugin_data.content) for one in values]
    assert [one.status for one in ends] == [Status.STATUS_FAILURE, Status.STATUS_SUCCESS]  # stopped, and done


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file behind its header: blocks of 32 KiB, counted from the file's beginning, with parts
    of records, each behind a checksum, a length and a type (whole, first, middle, last)."""
    at, parts = 0, []
    while at < len(data):
        room = 2**15 - (at + 7) % 2**15
        if room < 7:
            at += room
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + 7 : at + 7 + size])
        at += 7 + size
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


@library("wandb")
def test_wandb_offline(tracked: Any) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    run = tracked("wandb", **{"wandb.mode": "offline"})
    seen, ids, histograms = {}, set(), 0
    for file in sorted((run.run / "wandb").glob("offline-run-*/*.wandb")):
        for data in leveldb_log(file.read_bytes()[7:]):
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            items = {(one.key or ".".join(one.nested_key)): one.value_json for one in record.history.item}
            if "loss" in items:
                seen[int(items["step"])] = float(items["loss"])
                histograms += "histogram" in str(items)
    assert seen == pytest.approx(losses(run))
    assert len(ids) == 1
    assert histograms == STEPS


class Draws(Plugin):
    """Records a file in each run, and one at its end."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Any) -> None:
        self.job = job
        self.write("plots/first.txt")

    @hookimpl
    def on_end(self, finished: Any) -> None:
        self.write("last.txt")

    def write(self, name: str) -> None:
        file = self.job.run.artifact(name)
        file.write_text(name)
        self.job.record(file, self)


@library("wandb")
def test_wandb_gets_artifacts_on_request(run_forge: RunForge) -> None:
    for asked in (False, True):
        run = run_forge(["wandb", Draws], {"wandb.mode": "offline", "wandb.artifacts": asked}, name=str(asked))
        (files,) = (run.run / "wandb").glob("offline-run-*/files")
        found = {path.relative_to(files).as_posix() for path in files.rglob("*.txt")}
        assert {"plots/first.txt", "last.txt"} <= found if asked else not found & {"plots/first.txt", "last.txt"}


@library("mlflow")
@library("sqlalchemy")
def test_mlflow_gets_artifacts_on_request(run_forge: RunForge) -> None:
    from mlflow import MlflowClient

    run = run_forge(["mlflow", Draws], {"mlflow.artifacts": True})
    client, own = MlflowClient(f"sqlite:///{run.run.parent}/mlflow.db"), (run.run / "mlflow" / "id").read_text()
    files = [one for folder in (None, "plots") for one in client.list_artifacts(own, folder) if not one.is_dir]
    assert {one.path for one in files} >= {"plots/first.txt", "last.txt"}
    assert Path(client.download_artifacts(own, "plots/first.txt")).read_text() == "plots/first.txt"


@library("trackio")
def test_trackio_gets_artifacts_on_request(
    run_forge: RunForge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = trackio_home(tmp_path, monkeypatch)
    for asked in (False, True):
        run_forge(["trackio", Draws], {"trackio.artifacts": asked, "trackio.project": f"p{asked}"})
    stored = {path.read_text() for path in home.rglob("*") if path.is_file() and path.stat().st_size < 20}
    assert {"plots/first.txt", "last.txt"} <= stored
    names = sqlite3.connect(home / "pTrue.db").execute("select name from artifacts").fetchall()
    assert {"plots-first.txt", "last.txt"} <= {name for (name,) in names}
    assert sqlite3.connect(home / "pFalse.db").execute("select count(*) from artifacts").fetchone() == (0,)


@library("mlflow")
@library("sqlalchemy")
def test_mlflow(tracked: Any) -> None:
    from mlflow import MlflowClient

    run = tracked("mlflow")
    client = MlflowClient(f"sqlite:///{run.run.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("forge")
    (found,) = client.search_runs([experiment.experiment_id])
    history = {one.step: one.value for one in client.get_metric_history(found.info.run_id, "loss")}
    assert history == pytest.approx(losses(run))
    assert found.info.status == "FINISHED"
    assert found.data.params["train.steps"] == str(STEPS)
    assert [one.path for one in client.list_artifacts(found.info.run_id)] == ["A word.txt"]


def trackio_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for Trackio's files, which it reads from the environment when it is imported."""
    import sys

    from trackio.utils import TRACKIO_DIR

    own = [module for name, module in sys.modules.items() if name.partition(".")[0] == "trackio"]
    for module in own:
        for key, path in list(vars(module).items()):
            if isinstance(path, Path) and path.is_relative_to(TRACKIO_DIR):
                monkeypatch.setattr(module, key, tmp_path / "trackio" / path.relative_to(TRACKIO_DIR))
    return tmp_path / "trackio"


@library("trackio")
def test_trackio(tracked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import json

    trackio_home(tmp_path, monkeypatch)
    run = tracked("trackio")
    rows = sqlite3.connect(tmp_path / "trackio" / "forge.db").execute("select run_name, step, metrics from metrics")
    found = [(name, step, json.loads(values)) for name, step, values in rows]
    assert {step: values["loss"] for _, step, values in found if "loss" in values} == pytest.approx(losses(run))
    assert {name for name, *_ in found} == {(run.run / "trackio" / "name").read_text()}
    assert any("spread.losses" in values for *_, values in found)
    assert "Trackio" not in capsys.readouterr().out


@library("aim")
def test_aim(tracked: Any) -> None:
    from aim import Run
    from aim.storage.context import Context

    run = tracked("aim")
    found = Run((run.run / "aim" / "id").read_text(), repo=str(run.run.parent), system_tracking_interval=None)
    _, values = found.get_metric("loss", Context({})).values.sparse_list()
    assert sorted(values) == pytest.approx(sorted(losses(run).values()))
    assert found["config"]["train.steps"] == STEPS
    assert found.name == run.run.name


# -- bad trackers ---------------------------------------------------------------------------------


class Bad(Tracker):
    """Fills its queue of two, and ends a run within half a second."""

    api = (1, 0)
    capacity = 2
    patience = 0.5
    told: list[int]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.told = []  # of each class: a thread that was released late must not write into another test's

    def open(self, run: Any, config: Mapping[str, Any]) -> None:
        self.told.clear()

    def log(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Bins]) -> None:
        self.told.append(step)
        self.trouble()

    def trouble(self) -> None: ...


class Raises(Bad):
    """Raises."""

    def trouble(self) -> None:
        raise ValueError("no such column")


class Exits(Bad):
    """Tries to end the process."""

    def trouble(self) -> None:
        raise SystemExit(3)


class FillsDisk(Bad):
    """Finds the disk full."""

    def trouble(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


class Blocks(Bad):
    """Waits for a minute for a server."""

    released = threading.Event()

    def trouble(self) -> None:
        self.released.wait(60)


@pytest.fixture
def release() -> Iterator[None]:
    Blocks.released.clear()
    yield
    Blocks.released.set()
    for thread in threading.enumerate():
        if thread.name == "tracker blocks":
            thread.join(10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tracker", "says"),
    [
        (Raises, "Plugin 'raises' failed in log and is left out from here on: ValueError: no such column"),
        (Exits, "Plugin 'exits' failed in log and is left out"),
        (FillsDisk, "Plugin 'fills_disk' failed in log and is left out from here on: OSError"),
        (Blocks, "Plugin 'blocks' does not keep up"),
    ],
)
def test_a_bad_tracker_changes_nothing_and_warns_once(
    tracker: type[Bad], says: str, run_forge: RunForge, caplog: pytest.LogCaptureFixture, release: None, tmp_path: Path
) -> None:
    right = run_forge([Spread], SETTINGS, steps=10, folder=tmp_path / "right")
    began = time.perf_counter()
    with caplog.at_level(logging.WARNING, "forge_train"):
        run = run_forge([tracker, Spread], SETTINGS, steps=10, folder=tmp_path / "wrong")
    assert time.perf_counter() - began < 30  # and not a minute
    assert run.numbers == right.numbers
    assert tracker.told == [1]
    warned = [one for one in caplog.records if one.levelno >= logging.WARNING and one.exc_info is None]
    (about,) = [one.getMessage() for one in warned if "lugin '" in one.getMessage()]
    assert about.startswith(says)


def test_a_check_that_fails_is_named_and_leaves_the_tracker_out(
    run_forge: RunForge, caplog: pytest.LogCaptureFixture
) -> None:
    class Unsure(Bad):
        """Fails before it begins."""

        def check(self) -> None:
            raise ValueError("no such server")

    with caplog.at_level(logging.WARNING, "forge_train"):
        run_forge([Unsure])
    (about,) = [one.getMessage() for one in caplog.records if "'unsure'" in one.getMessage() and one.exc_info is None]
    assert about == "Plugin 'unsure' failed in check and is left out from here on: ValueError: no such server"
    assert Unsure.told == []


def test_a_step_waits_for_no_tracker(run_forge: RunForge, release: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handing a record over costs microseconds, whatever the tracker does with it; 1 % of a 100 ms step are 1,000."""
    spent = []
    real = Tracker._send

    def send(self: Tracker, method: str, *arguments: Any) -> None:
        began = time.perf_counter()
        real(self, method, *arguments)
        spent.append(time.perf_counter() - began)

    monkeypatch.setattr(Tracker, "_send", send)
    run_forge([Blocks], steps=40)
    assert len(spent) > 40
    assert sorted(spent)[len(spent) // 2] < 200e-6


def test_what_is_queued_is_written_before_a_run_ends(run_forge: RunForge) -> None:
    class Slow(Tracker):
        """Takes its time."""

        told: list[int] = []

        def open(self, run: Any, config: Mapping[str, Any]) -> None: ...

        def log(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Bins]) -> None:
            time.sleep(0.05)
            self.told.append(step)

        def close(self, outcome: str) -> None:
            self.told.append(-1)

    run_forge([Slow], steps=10)
    assert Slow.told == [*range(1, 11), -1]


def test_a_tracker_sees_what_other_observers_do_at_the_end(run_forge: RunForge) -> None:
    class Aardvark(Tracker):
        """Comes before all others by its name."""

        texts: list[str] = []

        def open(self, run: Any, config: Mapping[str, Any]) -> None: ...

        def log(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Bins]) -> None: ...

        def text(self, name: str, text: str, step: int) -> None:
            self.texts.append(name)

    run_forge([Aardvark, "sample"], {"sample.tokens": 2})
    assert Aardvark.texts == ["A sample"]


def test_a_missing_library_is_named_at_start_up(run_forge: RunForge, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    hidden = ("wandb", "mlflow", "trackio", "aim")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in hidden else real(name, *more))
    for name in hidden:
        with pytest.raises(ConfigError, match=rf"pip install 'forge-train\[{name}\]'"):
            run_forge([name])


@library("wandb")
def test_a_missing_login_refuses_the_run_in_one_sentence(
    run_forge: RunForge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match=r"^wandb: there is no login here. Run `wandb login`, set WANDB_API_KEY, or"):
        run_forge(["wandb"], folder=tmp_path / "runs")


def test_a_tracker_that_takes_nothing_is_refused_before_a_run() -> None:
    class Half(Tracker):
        """Begins, and takes nothing."""

        api = (1, 0)

        def open(self, run: object, config: object) -> None: ...

    with pytest.raises(PluginError, match="Half lacks log, which every tracker implements"):
        Half(None)

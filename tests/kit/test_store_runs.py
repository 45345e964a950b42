"""Runs whose checkpoints lie in an object store, or are mirrored there."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import toys
from bucket import bucket, keys
from forge_train import ConfigError, ForgeError, Plugin, hookimpl
from forge_train.checkpoint.checkpoint import check, found
from forge_train_kit.stores.store import Store
from saving import ASYNC, Lingering, stepping

pytestmark = [pytest.mark.unit]

EVERY = {"checkpoint.every": 1, "checkpoint.keep": 2}
FOLDER = {**EVERY, "checkpoint.folder": "bucket://b"}
MIRROR = {**EVERY, "checkpoint.mirror": "bucket://b"}


def there(run: str = "a", address: str = "bucket://b") -> list[int]:
    """Steps of the whole checkpoints in the store."""
    return [stored.step for stored in Store.of_run(address, run).newest()]


def here(run: Path) -> list[int]:
    return [saved.step for saved in found(run / "checkpoints") if not check(saved.path, contents=True)]


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Path]:
    with bucket(tmp_path / "bucket") as folder:
        yield folder


def events(run: Any, name: str) -> list[int]:
    return [event["step"] for event in run.events if event["event"] == name]


@pytest.mark.parametrize("more", [{}, ASYNC])
def test_a_run_goes_on_from_the_store_on_another_machine(tmp_path: Path, far: Path, more: dict[str, Any]) -> None:
    through = toys.run(tmp_path / "one", toys.Noise, toys.Average, name="a", steps=5, config={**EVERY, **more})
    first = toys.run(
        tmp_path / "two", toys.Noise, toys.Average, name="a", steps=5, stop_at=3, config={**FOLDER, **more}
    )
    assert there() == [3, 2]
    assert here(first.run) == [3]
    assert {2, 3} <= {*events(first, "checkpoint_copied")} <= {1, 2, 3}
    assert events(first, "checkpoint_pruned") in ([1], [])  # it went before it was copied, if the machine is slow
    shutil.rmtree(tmp_path / "two")
    second = toys.run(tmp_path / "two", toys.Noise, toys.Average, name="a", steps=5, config={**FOLDER, **more})
    assert events(second, "resumed") == [3]
    assert second.numbers == through.numbers[3:]
    assert there() == [5, 4]


def test_a_folder_that_is_behind_is_brought_up_to_the_store(tmp_path: Path, far: Path) -> None:
    config = {**MIRROR, "checkpoint.keep": 9}
    run = toys.run(tmp_path, name="a", steps=4, config=config).run
    for step in (4, 3):
        shutil.rmtree(run / "checkpoints" / f"step-0000000{step}")
    (run / "outcome.json").unlink()
    assert events(toys.run(tmp_path, name="a", steps=5, config=config), "resumed") == [4]


def test_where_a_checkpoint_was_removed(tmp_path: Path, far: Path) -> None:
    config = {**FOLDER, "checkpoint.keep": 1}
    toys.run(tmp_path, name="a", steps=1, config=config)
    run = toys.run(tmp_path, name="a", steps=2, config=config)
    gone = [event["path"] for event in run.events if event["event"] == "checkpoint_pruned"]
    assert gone == ["bucket://b/a/checkpoints/step-00000001"]


def test_a_mirror_that_fails_ends_nothing_and_is_filled_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def down(what: str) -> None:
        if what.startswith("put"):
            raise ConnectionError("the network is gone")

    with bucket(tmp_path / "bucket", down):
        run = toys.run(tmp_path, name="a", steps=3, config=MIRROR)
        assert run.finished.outcome == "done"
    assert "Checkpoints were not copied: bucket://b/a/checkpoints/step-0000000" in caplog.text
    assert "the network is gone (6 tries). Those that checkpoint.keep selects stay in " in caplog.text
    with bucket(tmp_path / "bucket"):
        assert (there(), here(run.run)) == ([], [3, 2])
        toys.run(tmp_path, name="a", steps=4, config={**MIRROR, "checkpoint.every": 9})
        assert there() == [4, 3]


def test_what_a_store_refuses_stays_in_the_run_s_folder(tmp_path: Path) -> None:
    broken = threading.Event()

    def call(what: str) -> None:
        if broken.is_set() and what.startswith("put"):
            raise ConnectionError("the network is gone")

    def at(step: int) -> None:
        if step == 3:
            broken.set()

    with bucket(tmp_path / "bucket", call):
        run = toys.run(tmp_path, stepping(at), name="a", steps=6, config=FOLDER).run
        assert here(run) == [6, 5]
        assert all(step <= 3 for step in there())
        broken.clear()
        toys.run(tmp_path, stepping(at), name="a", steps=7, config={**FOLDER, "checkpoint.every": 9})
        assert there() == [7, 6]


def test_a_checkpoint_that_is_being_copied_stays_and_training_goes_on(tmp_path: Path) -> None:
    first, passed, waited = threading.Event(), threading.Event(), []
    looked = Lingering()

    def slow(what: str) -> None:
        if threading.current_thread().name == "forge-checkpoint" and not looked.over.is_set():
            looked.keep()
        if what.startswith("put") and not first.is_set():
            first.set()
            waited.append(passed.wait(300))

    def at(step: int) -> None:
        if step == 1:  # the look at the store when the run begins; until it has ended, no copy begins
            assert looked.over.wait(60)
        if step == 2:
            assert not looked.gone.is_set()
            looked.may_go.set()
            assert first.wait(300)
        if step == 5:
            assert [path.name for path in sorted((tmp_path / "a" / "checkpoints").glob("step-*"))] == [
                "step-00000001",
                "step-00000003",
                "step-00000004",
            ]
            passed.set()

    with bucket(tmp_path / "bucket", slow):
        run = toys.run(tmp_path, stepping(at), name="a", steps=5, config=MIRROR)
        assert set(waited) == {True}  # files are sent by several threads, of which each may be the first
        assert (there(), here(run.run)) == ([5, 4], [5, 4])


def test_the_best_stays_in_the_store_over_a_resume_elsewhere(tmp_path: Path, far: Path) -> None:
    best = {"checkpoint.best": "evaluation.loss", "checkpoint.best_is": "highest", "train.evaluate_every": 1}
    config = {**FOLDER, **best, "checkpoint.keep": 1}
    first = toys.run(tmp_path / "one", name="a", steps=2, config=config)
    assert there() == [2, 1]
    second = toys.run(tmp_path / "two", name="a", steps=4, config=config)
    losses = {one["step"]: one["loss"] for run in (first, second) for one in run.events if one["event"] == "evaluation"}
    assert max(losses, key=lambda step: losses[step]) == 1
    assert there() == [4, 1]


def test_a_roll_back_removes_what_came_after_from_the_store_and_finds_there_what_came_before(
    tmp_path: Path, far: Path
) -> None:
    class Back(Plugin):
        asked = False

        @hookimpl
        def on_start(self, job: Any) -> None:
            self.job = job

        @hookimpl
        def on_step(self, step: Any) -> None:
            if step.step == 5 and not Back.asked:
                Back.asked = True
                self.job.control.roll_back("again", before=3)

    config = {**FOLDER, "checkpoint.keep": 9, "checkpoint.every": 1}
    run = toys.run(tmp_path, Back, name="a", steps=6, config=config)
    assert events(run, "resumed") == [2]
    assert there() == [6, 5, 4, 3, 2, 1]
    assert run.finished.outcome == "done"


def test_a_checkpoint_stays_in_the_folder_until_a_newer_one_is_whole_there(tmp_path: Path, far: Path) -> None:
    def at(step: int) -> None:
        if step == 3:
            (tmp_path / "a" / "checkpoints" / "step-00000009").mkdir()

    toys.run(tmp_path, stepping(at), name="a", steps=4, config={**FOLDER, "checkpoint.every": 2, "checkpoint.keep": 3})
    assert {path.name for path in (tmp_path / "a" / "checkpoints").glob("step-*")} == {"step-00000004", "step-00000009"}


def test_a_run_that_starts_over_takes_a_name_that_is_free_in_the_store_too(tmp_path: Path, far: Path) -> None:
    toys.run(tmp_path / "one", name="a", steps=1, config=MIRROR)
    again = toys.run(tmp_path / "two", name="a", steps=1, config=MIRROR, resume="never")
    assert (again.run.name, there("a"), there("a-2")) == ("a-2", [1], [1])


def test_a_store_that_can_t_be_read_is_told_before_a_run_begins(tmp_path: Path) -> None:
    def down(what: str) -> None:
        raise PermissionError(f"{what}: no such key")

    with (
        bucket(tmp_path / "bucket", down),
        pytest.raises(ForgeError, match=r"^checkpoint\.mirror: bucket://b/a.* no such key\. The run may") as told,
    ):
        toys.run(tmp_path, name="a", steps=1, config=MIRROR)
    assert (told.value.code, told.value.type, told.value.where.key) == (1, "checkpoint", "checkpoint.mirror")
    with pytest.raises(ConfigError, match=r"^checkpoint\.mirror: nowhere://b/a/checkpoints can't be read: Protocol"):
        toys.run(tmp_path, name="a", steps=1, config={"checkpoint.mirror": "nowhere://b"})
    assert not (tmp_path / "a").exists()


def test_a_new_run_without_a_name_begins_although_its_store_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def down(what: str) -> None:
        raise ConnectionError("the network is gone")

    with bucket(tmp_path / "bucket", down):
        run = toys.run(tmp_path, steps=1, config={**FOLDER, "checkpoint.best": "loss"})
    assert (run.finished.outcome, here(run.run)) == ("done", [1])
    assert "checkpoint.folder: bucket://b/" in caplog.text
    assert "the network is gone (6 tries). The run begins without it." in caplog.text


def test_nothing_is_left_of_a_run_whose_name_another_has_in_the_store(tmp_path: Path, far: Path) -> None:
    toys.run(tmp_path / "one", name="a", steps=1, config=MIRROR)
    with pytest.raises(ConfigError, match="differs from the one that saved"):
        toys.run(tmp_path / "two", name="a", steps=2, config={**MIRROR, "run.seed": 5})
    assert not (tmp_path / "two" / "a").exists()


def test_a_store_is_another_place(tmp_path: Path, far: Path) -> None:
    own = {"checkpoint.mirror": f"file://{tmp_path}"}
    with pytest.raises(ConfigError, match=r"^checkpoint\.mirror: file://.* is the run's own folder already; name ano"):
        toys.run(tmp_path, name="a", steps=1, config=own)
    twice = {"checkpoint.folder": "bucket://b", "checkpoint.mirror": "bucket://b/"}
    with pytest.raises(ConfigError, match=r"^checkpoint\.mirror: bucket://b/ is checkpoint\.folder already; name ano"):
        toys.run(tmp_path, name="a", steps=1, config=twice)


def test_a_run_has_a_folder_elsewhere_and_a_mirror(tmp_path: Path, far: Path) -> None:
    mirror = {**FOLDER, "checkpoint.mirror": str(tmp_path / "mirror")}
    run = toys.run(tmp_path, name="a", steps=3, config=mirror).run
    assert there() == there(address=str(tmp_path / "mirror")) == [3, 2]
    shutil.rmtree(run)
    shutil.rmtree(far)
    far.mkdir()
    assert events(toys.run(tmp_path, name="a", steps=4, config=mirror), "resumed") == [3]
    assert there() == [4, 3]


def test_a_run_with_checkpoints_goes_on_although_its_mirror_can_t_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with bucket(tmp_path / "bucket"):
        toys.run(tmp_path, name="a", steps=1, config=MIRROR)

    def down(what: str) -> None:
        raise PermissionError("no key")

    with bucket(tmp_path / "bucket", down):
        assert toys.run(tmp_path, name="a", steps=2, config=MIRROR).finished.step == 2
    assert "no key. The run continues from the newest checkpoint in its folder, of step 1." in caplog.text


def test_nothing_else_is_left_in_the_store(tmp_path: Path, far: Path) -> None:
    toys.run(tmp_path, name="a", steps=5, config=MIRROR)
    assert {key.rsplit("/", 1)[0] for key in keys(far)} == {f"b/a/checkpoints/step-0000000{step}" for step in (4, 5)}


@pytest.mark.parametrize("key", ["folder", "mirror"])
@pytest.mark.parametrize("address", ["memory://b", "simplecache::memory://b"])
def test_a_place_that_goes_with_the_process_is_refused(tmp_path: Path, key: str, address: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^checkpoint\.{key}: {address} is in the memory of this process, and would"
    ):
        toys.run(tmp_path, config={f"checkpoint.{key}": address})
    assert not list(tmp_path.glob("*/metrics.jsonl"))

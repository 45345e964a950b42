"""Reading ahead: nothing changes but the waiting, memory is bounded, and what goes wrong is named or left out."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

import forge_train_kit.data.loader
from crossed import few
from forge_train import Batch, ConfigError, Finished, ForgeError
from forge_train_kit.data.child import Payload, _place, _read
from forge_train_kit.data.documents import Documents
from forge_train_kit.data.loader import StreamLoader
from forge_train_kit.data.mixed import Mixture, Part
from forge_train_kit.data.plugin import DataPlugin, Prefetch
from forge_train_kit.data.proportions import Recipe
from forge_train_kit.data.rows import SplitRows
from forge_train_kit.data.shard import Shard
from forge_train_kit.data.stream import Ordered
from forge_train_kit.data.tokens import rows_of
from odd_rows import OddRows, Together

pytestmark = pytest.mark.unit

Kind = Literal["threads", "processes"]
KINDS = pytest.mark.parametrize("kind", ["threads", "processes"])
MODES = pytest.mark.parametrize(
    "mode", [{}, {"workers": 3}, {"workers": 2, "kind": "processes"}], ids=["inline", "threads", "processes"]
)


def job(rank: int = 0, ranks: int = 1, micro_batch: int = 2) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(micro_batch=micro_batch, evaluate_every=0)),
        dist=SimpleNamespace(data_rank=rank, data_ranks=ranks),
        device=torch.device("cpu"),
    )


@pytest.fixture
def make() -> Iterator[Callable[..., StreamLoader]]:
    made: list[StreamLoader] = []

    def build(rows: Any, prefetch: Prefetch, told: list[str] | None = None, **options: Any) -> StreamLoader:
        heard = [] if told is None else told
        made.append(StreamLoader(Ordered(rows, None, key="x"), job(**options), prefetch, heard.extend))
        return made[-1]

    yield build
    for one in made:
        one.close()


def values(loader: StreamLoader, batches: int) -> list[int]:
    """The number of each row that is given."""
    return [row for _ in range(batches) for row in next(loader).inputs[:, 0].tolist()]


def children(process: int | str = "self") -> set[int]:
    """Processes that one has started, zombies among them."""
    found: set[int] = set()
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since
            found.update(map(int, (task / "children").read_text().split()))
    return found


_earlier: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def threads_of_earlier_tests() -> None:
    """A loader that nobody closed ends its threads when it is collected, which may be now."""
    _earlier.clear()
    _earlier.update(threading.enumerate())


def readers() -> list[str]:
    """Threads that this test began, and that have not ended."""
    return [one.name for one in threading.enumerate() if one.name.startswith("data-") and one not in _earlier]


@MODES
def test_state_is_that_of_what_was_given(make: Callable[..., StreamLoader], mode: Any) -> None:
    loader = make(OddRows(100), Prefetch(**mode))
    assert values(loader, 3) == list(range(6))
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["sequences"] == 6
    assert values(loader, 5) == list(range(6, 16))
    loader.load_state_dict(state)
    assert values(loader, 2) == list(range(6, 10))
    loader.skip(10)
    assert values(loader, 1) == [20, 21]
    other = make(OddRows(100), Prefetch(**mode), ranks=2, rank=1)
    other.load_state_dict(state)
    assert values(other, 2) == [8, 9, 12, 13]


@KINDS
def test_memory_is_bounded_however_slow_the_consumer_is(
    make: Callable[..., StreamLoader], kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that live are counted: 100 times as slow as the readers, and never more of them than the bound."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = [0]
    whole = forge_train_kit.data.loader.as_batch

    def counted(arrays: Any, **options: Any) -> Batch:
        batch = whole(arrays, **options)
        alive.add(batch.inputs)
        most[0] = max(most[0], len(alive))
        return batch

    monkeypatch.setattr(forge_train_kit.data.loader, "as_batch", counted)
    loader = make(OddRows(10_000), Prefetch(workers=3, batches=2, kind=kind))
    for _ in range(12):
        next(loader)
        deadline = time.monotonic() + 60
        while len(alive) < 6 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)  # readers that do not stop here would be far ahead
    assert most[0] in (6, 7), "the six that wait, and the one that was given last"


def test_three_workers_read_at_the_same_time(make: Callable[..., StreamLoader]) -> None:
    loader = make(Together(3), Prefetch(workers=3, batches=1))
    assert values(loader, 6) == list(range(12))


@KINDS
def test_a_slow_source_is_read_during_the_step(make: Callable[..., StreamLoader], kind: Kind, tmp_path: Path) -> None:
    """When a step asks, its micro-batch has been read, and so have the ones after it."""
    log = tmp_path / "reads"
    loader = make(OddRows(1000, seconds=0.02, log=log), Prefetch(workers=2, batches=2, kind=kind))
    next(loader)
    for step in range(1, 5):
        deadline = time.monotonic() + 60
        while not all(task.done.is_set() for task in loader._ahead) and time.monotonic() < deadline:
            time.sleep(0.005)  # the step
        assert len(loader._ahead) == 4
        assert len(log.read_text().splitlines()) == step + 4
        next(loader)
    inline = make(OddRows(1000, log=tmp_path / "inline"), Prefetch())
    values(inline, 2)
    assert len((tmp_path / "inline").read_text().splitlines()) == 2


class TestBrokenSamples:
    @MODES
    def test_is_named(self, make: Callable[..., StreamLoader], mode: Any) -> None:
        loader = make(OddRows(100, {5: "broken"}), Prefetch(**mode))
        assert values(loader, 2) == [0, 1, 2, 3]
        with pytest.raises(ForgeError) as failed:
            next(loader)
        assert str(failed.value) == (
            "sample 5 (odd.bin, document 5) can't be read: stage decode: ValueError: not a picture."
        )
        assert failed.value.type == "data"
        assert loader.state_dict()["sequences"] == 4, "the run can continue from before it"

    @pytest.mark.slow
    @MODES
    def test_the_next_one_stands_in_on_any_ranks_and_after_a_resume(
        self, make: Callable[..., StreamLoader], mode: Any
    ) -> None:
        odd = {5: "broken", 8: "broken", 9: "broken", 19: "broken"}
        expected = [0, 1, 2, 3, 4, 6, 6, 7, 10, 10, *range(10, 19), 0]
        prefetch = Prefetch(on_error="skip", **mode)
        told: list[str] = []
        assert values(make(OddRows(20, odd), prefetch, told), 10) == expected
        assert [one.partition(" (")[0] for one in told] == ["sample 5", "sample 8", "sample 9", "sample 19"]
        pair = [make(OddRows(20, odd), prefetch, rank=rank, ranks=2) for rank in range(2)]
        assert [row for _ in range(5) for one in pair for row in values(one, 1)] == expected
        resumed = make(OddRows(20, odd), prefetch, told)
        resumed.load_state_dict({"sequences": 8})
        assert values(resumed, 6) == expected[8:]

    @MODES
    def test_a_failing_disk_is_no_broken_sample(self, make: Callable[..., StreamLoader], mode: Any) -> None:
        loader = make(OddRows(20, {1: "io"}), Prefetch(on_error="skip", **mode))
        with pytest.raises(ForgeError, match=r"sample 1 .*stage decode: .*Input/output error"):
            next(loader)

    def test_a_source_of_which_nothing_can_be_read(self, make: Callable[..., StreamLoader]) -> None:
        loader = make(OddRows(3, dict.fromkeys(range(3), "broken")), Prefetch(on_error="skip"))
        with pytest.raises(ForgeError, match=r"sample 0 .* Nor can the 100 samples after it"):
            next(loader)


class TestWorkersThatEnd:
    def test_one_that_is_killed_is_named(self, make: Callable[..., StreamLoader]) -> None:
        loader = make(OddRows(100, {7: "killed"}), Prefetch(workers=2, kind="processes"))
        assert values(loader, 3) == list(range(6))
        with pytest.raises(
            ForgeError,
            match=r"process data-\d \(pid \d+\) died: killed by SIGKILL .*read sample 6 \(odd.bin, document 6\)",
        ):
            next(loader)

    @pytest.mark.slow
    def test_one_that_is_killed_is_started_anew(self, make: Callable[..., StreamLoader], tmp_path: Path) -> None:
        rows = OddRows(100, {7: "killed"}, once=tmp_path / "once")
        loader = make(rows, Prefetch(workers=2, kind="processes", on_error="skip"))
        assert values(loader, 8) == list(range(16)), "nothing is left out"
        again = make(OddRows(100, {7: "killed"}), Prefetch(workers=1, kind="processes", on_error="skip"))
        assert values(again, 3) == list(range(6))
        with pytest.raises(ForgeError, match=r"sample 6 .* It was the second time"):
            next(again)

    @pytest.mark.slow
    def test_a_process_that_hangs_is_ended(self, make: Callable[..., StreamLoader], tmp_path: Path) -> None:
        late = Prefetch(workers=1, kind="processes", deadline=5)
        with pytest.raises(
            ForgeError, match=r"process data-0 \(pid \d+\) hung, and was ended, while it read sample 0 "
        ):
            next(make(OddRows(100, {1: "hangs"}), late))
        rows = OddRows(100, {1: "hangs"}, once=tmp_path / "once")
        loader = make(rows, Prefetch(workers=1, kind="processes", deadline=5, on_error="skip"))
        assert values(loader, 2) == [0, 1, 2, 3]

    def test_one_that_hangs_does_not_hold_up_a_roll_back(self, make: Callable[..., StreamLoader]) -> None:
        loader = make(
            OddRows(100, {2: "hangs", 4: "hangs"}), Prefetch(workers=2, batches=1, kind="processes", deadline=5)
        )
        assert values(loader, 1) == [0, 1]
        loader.load_state_dict({"sequences": 50})
        assert values(loader, 2) == [50, 51, 52, 53]

    def test_a_thread_that_hangs_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        release = threading.Event()
        monkeypatch.setattr(OddRows, "hangs", lambda self: release.wait(60))
        loader = StreamLoader(
            Ordered(OddRows(100, {1: "hangs"}), None, key="x"), job(), Prefetch(workers=1, deadline=2.0)
        )
        try:
            with pytest.raises(
                ForgeError, match=r"thread data-0 hangs: for 2 s .* reading sample 0 \(odd.bin, document 0\)"
            ):
                next(loader)
        finally:
            release.set()
            loader.close()
        assert not readers()


class TestShutdown:
    @pytest.mark.slow
    @KINDS
    def test_nothing_is_left(self, kind: Kind) -> None:
        before = children()
        loader = StreamLoader(Ordered(OddRows(100), None, key="x"), job(), Prefetch(workers=3, kind=kind))
        values(loader, 2)
        assert len(readers()) == 3
        assert len(children() - before) == (3 if kind == "processes" else 0)
        loader.close()
        assert not readers()
        assert children() == before
        assert values(loader, 1) == [4, 5], "it goes on if asked"
        del loader
        gc.collect()
        assert not readers(), "nor of one that nobody closed"
        assert children() == before

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "how", few([(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGKILL,), (None,)], [(signal.SIGTERM,), (None,)])
    )
    def test_processes_end_with_their_parent(self, how: signal.Signals | None) -> None:
        code = (
            "import signal, sys, time; sys.path[:0] = [{here!r}, {beside!r}]; import test_prefetch as t\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what runs in the background ignores it
            "loader = t.StreamLoader(t.Ordered(t.OddRows(100, {{9: 'hangs'}}), None, key='x'), t.job(), "
            "t.Prefetch(workers=2, kind='processes'))\n"
            "next(loader); print(*t.children(), flush=True)\n"
            "{rest}"
        ).format(
            here=str(Path(__file__).parent),
            beside=str(Path(__file__).parents[1]),
            rest="time.sleep(600)" if how else "raise RuntimeError",
        )
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        if how is not None:
            process.send_signal(how)
        process.wait(60)
        deadline = time.monotonic() + 30
        while any(map(lives, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(lives, pids))


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"  # a zombie is left for whoever adopted it
    return False


def test_a_source_that_can_not_be_sent_is_told(
    make: Callable[..., StreamLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make(Together(1), Prefetch(workers=1, kind="processes"))
    with pytest.raises(ConfigError, match="can't be sent to a process .*; choose 'threads'"):
        next(loader)
    module: Any = types.ModuleType("only_here")
    module.Rows = type("Rows", (OddRows,), {"__module__": "only_here"})
    monkeypatch.setitem(sys.modules, "only_here", module)
    loader = make(module.Rows(100), Prefetch(workers=1, kind="processes"))
    with pytest.raises(ConfigError, match="can't be sent to a process .*only_here.*; choose 'threads'"):
        next(loader)


def test_maps_are_sent_by_name_and_arrays_once(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    np.arange(1000, dtype=np.uint16).tofile(file)
    mapped = np.asarray(np.memmap(file, "<u2", mode="r", offset=20))[5:400]
    plain = np.arange(100_000)
    payload = Payload({"mapped": mapped, "plain": plain}.get)
    found = _read(os.dup(payload.fileno()))
    payload.close()
    assert found("mapped").tolist() == mapped.tolist()
    assert _place(found("mapped")) == (str(file), "<u2", 30, (395,))
    assert found("plain").tolist() == plain.tolist()
    assert not found("plain").flags.owndata, "it lies in the file, which all processes map"
    assert _place(np.asarray(np.memmap(file, "<u2", mode="c"))) is None


def test_a_file_that_is_cut_while_it_is_read_is_named(make: Callable[..., StreamLoader], tmp_path: Path) -> None:
    """The system ends a process that reads a map beyond its file: here not the run's own."""
    file = tmp_path / "x.bin"
    np.arange(2_000_000, dtype=np.uint32).tofile(file)
    text = Documents([Shard(file, np.asarray(np.memmap(file, "<u4", mode="r")), np.arange(100, 2_000_001, 100))])
    loader = make(SplitRows(text, 64, isolate=False), Prefetch(workers=1, kind="processes"), micro_batch=1)
    assert next(loader).inputs[0, :2].tolist() == [0, 1]
    loader.skip(20_000)
    os.truncate(file, 4096)
    where = r"sample 20,001 \(.*/x.bin, document 12,800, token 1,280,064\)"
    with pytest.raises(ForgeError, match=rf"killed by SIGBUS, while it read {where}"):
        next(loader)


def test_places_of_packed_and_mixed_rows() -> None:
    text = Documents(
        [Shard(Path("a"), np.arange(30), np.array([10, 30])), Shard(Path("b"), np.arange(8), np.array([8]))]
    )
    rows = rows_of(text, 16, packing="pad", isolate=True, pad=0)
    assert [rows.where(row) for row in range(rows.count)] == [
        "a, document 0, token 0",
        "a, document 1, token 10",
        "a, document 1, token 26",
        "b, document 0, token 0",
    ]
    parts = [Part(name, Ordered(rows, None, key="x")) for name in ("web", "code")]
    mixture = Mixture(parts, Recipe([(0, {"web": 1, "code": 1})], 0), key="x")
    place = np.array([1, 3])
    assert mixture.where(place) == "code: b, document 0, token 0"
    assert mixture.after(place).tolist() == [1, 0]


@pytest.mark.parametrize("error", [None, RuntimeError()])
def test_ranks_agree_on_what_was_skipped_unless_one_has_failed(error: Exception | None) -> None:
    """The others may be gone, and a collective would wait for them."""
    asked: list[object] = []
    plugin = DataPlugin(SimpleNamespace(prefetch=Prefetch(on_error="skip")))
    gather = lambda value: [asked.append(value), [value]][1]  # noqa: E731
    plugin._job = SimpleNamespace(dist=SimpleNamespace(data_rank=0, main=True, gather_objects=gather))  # type: ignore[assignment]
    plugin.on_end(Finished("failed" if error else "done", 1, None, 1, Path(), error=error))
    assert asked == ([] if error else [(0, 0)])

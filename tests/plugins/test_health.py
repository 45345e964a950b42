"""`health` and `forge doctor --nproc`: known answers, slow ranks, clocks, disk, devices."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import toys
from forge_cli import environment, forge_process
from forge_train import ForgeError, hookimpl, section
from forge_train.mesh.layout import Layout
from forge_train_plugins.resilience import _health as stragglers
from forge_train_tools import health
from forge_train_tools.health import Measured, compare, device_complaints, disk, known_product
from forge_train_tools.links import SENT, Links, ring
from forge_train_tools.stacks import dump_collectives
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.unit]


@pytest.mark.slow
@pytest.mark.parametrize("size", [7, 525, 4095])
def test_the_known_product_is_one(size: int) -> None:
    one, other, answer = known_product(size)
    assert answer.abs().max() < 2**24, "exact in float32, in whatever order it is summed"
    assert max(one.abs().max(), other.abs().max()) <= 4
    assert len(answer.unique()) == 8
    rows = torch.randint(0, size, (5,))
    assert torch.equal((one[rows].double() @ other.double()).float(), answer[rows])


def found(*measured: Measured, slow: float = 1.5) -> list[tuple[str, str, str]]:
    return [(one.name, one.status, one.text) for one in compare(list(measured), slow)]


def rank(**values: Any) -> Measured:
    usual: dict[str, Any] = {
        "host": "a",
        "device": "cpu",
        "wrong": 0,
        "product_seconds": 0.01,
        "wrong_sums": 0,
        "reduce_seconds": 0.001,
        "clock": 100.0,
    }
    return Measured(**{**usual, **values})


def test_a_rank_that_differs_is_named() -> None:
    assert {status for _, status, _ in found(rank(), rank(), rank())} == {"ok"}
    text = "rank 1 (cuda:3 on b) computes 5 elements of a known product wrong"
    assert ("product", "fail", text) in found(rank(), rank(wrong=5, host="b", device="cuda:3"))
    text = "rank 0 (cpu on a) computes 2 elements of a known all-reduce wrong"
    assert ("all-reduce", "fail", text) in found(rank(wrong_sums=2), rank())
    text = "rank 2 (cpu on a) takes 1.6 × the median for the same product"
    assert ("speed", "warn", text) in found(rank(), rank(), rank(product_seconds=0.016))
    assert "speed" not in {name for name, _, _ in found(rank(), rank(), rank(product_seconds=0.014))}
    assert ("clock", "warn", "7.0 s between a and b") in found(rank(), rank(host="b", clock=107.0))
    assert ("device", "warn", "rank 0 (cpu on a): hot") in found(rank(complaints=("hot",)))


def test_links_go_around_the_machines() -> None:
    """Between ranks of the same place on both; a rank has one at a time."""
    assert ring(["a", "a"]) == []
    assert ring(["a", "b"]) == [[(0, 1)], [(1, 0)]]
    assert ring(["a", "a", "b", "b"]) == [[(0, 2), (1, 3)], [(2, 0), (3, 1)]]
    assert ring(["a", "b", "c"]) == [[(0, 1)], [(1, 2)], [(2, 0)]]
    assert ring(["a", "a", "b"]) == [[(0, 2)], [(2, 0)]]
    for machines in range(2, 9):
        rounds = ring([str(at) for at in range(machines)])
        assert sum(map(len, rounds)) == machines
        assert all(len({rank for edge in edges for rank in edge}) == 2 * len(edges) for edges in rounds)


def test_a_slow_link_is_named() -> None:
    """Among several by the others, and where all are slow by what they were."""

    def warned(links: Links, seconds: dict[tuple[int, int], float]) -> list[str]:
        return [one.text for one in links.compare("abc", seconds) if one.status == "warn"]

    second = SENT / 1e6
    links = Links(3.0)
    assert warned(links, {(0, 1): second, (1, 2): 2.9 * second, (2, 0): second}) == []
    said = "b to c (rank 1 to 2): 0.2 MB/s, 4.0 × slower than the median of all links"
    assert warned(links, {(0, 1): second, (1, 2): 4 * second, (2, 0): second}) == [said]
    slow = warned(links, {(0, 1): 10 * second, (1, 2): 20 * second, (2, 0): second})
    assert [text.partition(" (")[0] for text in slow] == ["a to b", "b to c"]
    assert slow[0].endswith("0.1 MB/s, 10.0 × slower than the median of all links in an earlier check")
    assert list(links.compare("aaa", {})) == []


def test_what_nvml_says() -> None:
    class NVMLError(Exception): ...

    def nvml(errors: int, reasons: int) -> Any:
        return SimpleNamespace(
            NVMLError=NVMLError,
            NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
            NVML_VOLATILE_ECC=0,
            nvmlDeviceGetTotalEccErrors=lambda handle, kind, counter: errors,
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: reasons,
            nvmlClocksThrottleReasonHwSlowdown=8,
            nvmlClocksThrottleReasonSwThermalSlowdown=32,
        )

    assert list(device_complaints(nvml(0, 4), None)) == []
    first, second = device_complaints(nvml(3, 32), None)
    assert first == "3 uncorrected memory errors since the driver was loaded"
    assert "because of heat" in second


def test_the_disk(tmp_path: Path) -> None:
    (one,) = disk(tmp_path)
    assert (one.name, one.status) == ("disk", "ok")
    (one,) = disk(tmp_path / "nowhere")
    assert (one.status, "can't be written" in one.text) == ("fail", True)


def test_a_device_that_computes_wrong_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At step 4 for the first time."""
    config = {"health.every": 4, "checkpoint.every": 3}
    assert toys.run(tmp_path, "health", steps=6, config=config).finished.outcome == "done"
    real, calls = health.known_product, []

    def flipped(size: int) -> Any:
        one, other, answer = real(size)
        calls.append(size)
        answer[3, 5] += len(calls) > 1
        return one, other, answer

    monkeypatch.setattr(health, "known_product", flipped)
    with pytest.raises(ForgeError, match=r"health: rank 0 .* computes 3 elements of a known product wrong\. Leave"):
        toys.run(tmp_path, "health", name="b", steps=6, config=config)
    assert [path.name for path in (tmp_path / "b" / "checkpoints").glob("step-*")] == ["step-00000003"]


def test_whom_the_others_wait_for() -> None:
    """Among the ranks of a stage, which do the same; where all work alike, nobody."""

    def warned(shares: list[float | None], **axes: int) -> list[str]:
        return [one.text for one in stragglers.compare(shares, Layout(**axes), 0.2) if one.status == "warn"]

    assert warned([0.95, 0.4, 0.45, 0.4], dp_shard=4) == [
        "rank 0 works in 95% of a step, and the others in 40%: they wait for it"
    ]
    assert warned([0.95, 0.7], dp_shard=2) == ["rank 0 works in 95% of a step, and the others in 70%: they wait for it"]
    assert warned([0.95, 0.8], dp_shard=2) == []
    assert warned([0.9, 0.9, 0.3, 0.6], dp_shard=2, pp=2) == [
        "rank 3 (stage 1, dp_shard 1) works in 60% of a step, and the others in 30%: they wait for it"
    ]
    assert warned([0.9, 0.1], pp=2) == []
    assert warned([0.95, None], dp_shard=2) == []


def test_a_device_is_judged_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the collectives that were recorded within steps; steps of which not all is known are left out."""

    class Event:
        def __init__(self) -> None:
            self.at = now["device"]

        def query(self) -> bool:
            return self.at <= now["done"]

        def elapsed_time(self, other: Any) -> float:
            return float(other.at - self.at)

    now, entries = {"host": 0, "device": 0.0, "done": 1e9}, list[dict[str, Any]]()
    monkeypatch.setattr(stragglers, "mark", Event)
    monkeypatch.setattr(stragglers, "_time_collectives", lambda: None)
    monkeypatch.setattr(stragglers, "recorded_collectives", lambda: entries)
    monkeypatch.setattr(stragglers.time, "time_ns", lambda: now["host"])
    share = stragglers.DeviceShare()

    def collective(took: float | None, retired: bool = True) -> None:
        entries.append(
            {"time_created_ns": now["host"], "retired": retired} | ({} if took is None else {"duration_ms": took})
        )

    def step(*took: float | None, **more: Any) -> None:
        now["host"] += 1
        with share.step():
            now["host"] += 1
            for one in took:
                collective(one, **more)
            now["device"] += 100.0
        now["host"] += 1

    collective(1000.0)  # before the first step
    for _ in range(3):
        step(20.0, 30.0)
        collective(70.0)  # a save's
    assert share.take() == pytest.approx(0.5)
    step(20.0)
    step(20.0)
    assert share.take() is None, "two steps say little"
    for _ in range(3):
        step(None, 40.0)  # of a group that is not timed
    step(90.0, retired=False)
    assert share.take() == pytest.approx(0.6)
    step(10.0)
    now["done"] = now["device"]
    for _ in range(3):
        step(20.0)
    assert share.take() is None, "the device has done one of them"
    now["done"] = 1e9
    for _ in range(3):
        step(20.0)
    del entries[:-2]
    assert share.take() is None, "the recorder has forgotten the first ones"


def test_collectives_of_nccl_are_recorded_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(at: int, name: str) -> dict[str, Any]:
        return {"time_created_ns": at, "profiling_name": name, "collective_seq_id": at, "process_group": ["0", "fsdp"]}

    for kind, found in (
        ("nccl", [entry(2, "nccl:all_reduce"), entry(7, "nccl:all_gather")]),
        ("fr", [entry(3, "gloo")]),
    ):
        record = json.dumps({"entries": found})
        name = f"_dump_{kind}_trace_json"
        monkeypatch.setattr(torch._C._distributed_c10d, name, lambda record=record: record, raising=False)
    file = tmp_path / "collectives.json"
    assert dump_collectives(file) == "nccl:all_gather number 7 of group 0"
    assert [one["time_created_ns"] for one in json.loads(file.read_text())] == [7, 3, 2]


class Dawdles(toys.Bare):
    """Takes long in each step on some ranks."""

    @section
    class Config:
        ranks: tuple[int, ...] = ()

    @hookimpl
    def on_start(self, job: Any) -> None:
        self.rank = job.dist.rank

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        if self.rank in self.config.ranks:
            time.sleep(0.1)


def dawdled(folder: str, ranks: list[int]) -> list[str]:
    """What `health` warns of on two ranks."""
    stragglers.interval = 0.005
    config = {"health.every": 12, "dawdles.ranks": ranks, "health.slow": 1e9}
    run = toys.run(Path(folder), "health", Dawdles, steps=12, config=config, name="run")
    return [event["reason"] for event in run.events if event["event"] == "anomaly"]


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_that_the_others_wait_for_is_named(ranks: Pool, tmp_path: Path) -> None:
    said, _ = ranks.run("test_health:dawdled", 2, timeout=300, folder=str(tmp_path / "a"), ranks=[1])
    assert [text.partition(" works in ")[0] for text in said if "wait for it" in text] == ["rank 1"]
    said, _ = ranks.run("test_health:dawdled", 2, timeout=300, folder=str(tmp_path / "b"), ranks=[0, 1])
    assert [text for text in said if "wait for it" in text] == []


def looked(folder: str) -> list[list[str]]:
    """What two ranks find."""
    from forge_train.mesh.distributed import DistributedContext
    from forge_train.mesh.layout import Layout

    with DistributedContext.join(Layout(dp_shard=2), "cpu") as dist:
        return [[one.name, one.status] for one in health.look(dist, Path(folder), 1e9)]


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_find_the_same(ranks: Pool, tmp_path: Path) -> None:
    one, other = ranks.run("test_health:looked", 2, timeout=120, folder=str(tmp_path))
    assert one == other
    assert one == [["product", "ok"], ["all-reduce", "ok"], ["clock", "ok"], ["disk", "ok"]]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.e2e
def test_doctor_with_processes(tmp_path: Path) -> None:
    ended = forge_process(
        "doctor", "--nproc", 2, "--json", "--run-dir", tmp_path, preloaded=True, env=environment(), timeout=300
    )
    assert ended.code == 0, ended.err
    texts = [one["text"] for one in json.loads(ended.out)["checks"] if one["name"] == "2 processes"]
    assert any(text.startswith("all-reduce: ") and text.endswith("GB/s") for text in texts)

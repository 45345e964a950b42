"""fsdp2, ddp and zero1: memory, bytes sent, evaluations, refusals; test_compositions.py compares their numbers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from crossed import few
from forge_train_tools.testing import Pool, PoolError

pytestmark = [pytest.mark.dist]

Settings = Mapping[str, Any]
LAYOUT = ("parallel.", "fsdp2.", "ddp.", "train.micro_batch")


class Reference:
    """Runs on one process, each trained once."""

    def __init__(self, ranks: Pool, folder: Path) -> None:
        self.ranks, self.folder, self.known = ranks, folder, {}
        self.numbers = itertools.count()

    def train(self, world: int, plugins: tuple[str, ...], config: Settings, **more: Any) -> list[dict[str, Any]]:
        folder = self.folder / str(next(self.numbers))
        folder.mkdir()
        return self.ranks.run(
            "cases:train", world, keep=True, folder=str(folder), plugins=plugins, config=dict(config), **more
        )

    def one(self, config: Settings) -> dict[str, Any]:
        """The same on one process; what belongs to the layout does not count."""
        config = {key: value for key, value in config.items() if not key.startswith(LAYOUT)}
        key = json.dumps(config, sort_keys=True)
        if key not in self.known:
            (self.known[key],) = self.train(1, (), config)
        return self.known[key]


@pytest.fixture(scope="module")
def runs(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(ranks, tmp_path_factory.mktemp("dist"))


HSDP = {"parallel.dp_replicate": 2}


def test_is_the_default_of_several_processes_and_not_looked_at_in_one(runs: Reference) -> None:
    (two, _), one = runs.train(2, (), {}), runs.one({})
    assert "fsdp2" in two["plugins"]
    assert "fsdp2" not in one["plugins"]
    (asked,) = runs.train(1, ("fsdp2",), {})
    assert asked["idle"] == ["fsdp2"]
    assert asked["weights"] == one["weights"]


def test_gradients_are_sent_and_weights_dropped_while_the_backward_pass_runs(ranks: Pool, tmp_path: Path) -> None:
    """Not after it: numbers would be the same, time and memory would not."""
    step = {"train.micro_batch": 1, "cross_entropy.chunk": 4}
    for reply in ranks.run(
        "shard_cases:while_backward",
        2,
        folder=str(tmp_path / "a"),
        plugins=["ddp"],
        config={**step, "ddp.bucket_mb": 0.01},
    ):
        assert reply["sent"] > 1
    for reply in ranks.run("shard_cases:while_backward", 2, folder=str(tmp_path / "b"), plugins=[], config=step):
        assert reply["sent"] > 1
        assert len(reply["sharded"]) > 1
        assert all(reply["sharded"]), "after the last chunk's backward, in each micro-batch"


@pytest.mark.parametrize(("world", "plugins"), few([(2, ()), (4, ()), (2, ("zero1",))], [(2, ()), (2, ("zero1",))]))
def test_memory_falls_with_the_number_of_ranks(runs: Reference, world: int, plugins: tuple[str, ...]) -> None:
    one = runs.one({"decoder.dim": 64})
    for reply in runs.train(world, plugins, {"decoder.dim": 64, "train.micro_batch": 3}):
        for what in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
            assert reply[what] == pytest.approx(one[what] / world, rel=0.1), what


@pytest.mark.parametrize(
    ("world", "plugins", "config", "textbook"),
    [
        # Shares of the whole model's bytes: (N-1)/N for each gather and each reduction.
        (2, (), {}, 3 / 2),
        pytest.param(4, (), {}, 3 * 3 / 4, marks=pytest.mark.extended),
        (4, (), HSDP, 3 / 2 + 2 * 1 / 2 * 1 / 2),
        pytest.param(2, (), {"cross_entropy.chunk": 16}, 3 / 2, marks=pytest.mark.extended),
        (2, (), {"fsdp2.reshard": "never"}, 2 / 2),
        (2, ("zero1",), {"train.micro_batch": 3}, 2 / 2),
        (2, ("ddp",), {"train.micro_batch": 3}, 2 / 2),
        (2, (), {"train.micro_batch": 3}, 2 * 2 / 2 + 1 / 2),
    ],
)
def test_sends_no_more_than_the_textbook(
    runs: Reference, world: int, plugins: tuple[str, ...], config: Settings, textbook: float
) -> None:
    config = {"decoder.dim": 64, "train.micro_batch": 12 // world, **config}
    model = runs.one({"decoder.dim": 64})["parameter_bytes"]
    reply = runs.train(world, plugins, config)[0]
    sent = sum(reply["sent"][-1].values())
    print(f"{world} {plugins} {config}: {sent / (textbook * model):.3f} of the textbook, {reply['sent'][-1]}")
    assert 0.5 < sent / (textbook * model) <= 1.05


@pytest.mark.parametrize(
    ("plugins", "config"),
    few(
        [((), {}), (("fsdp2",), {"fsdp2.reshard": "never"}), (("zero1",), {}), (("ddp",), {})],
        [(("fsdp2",), {"fsdp2.reshard": "never"})],
    ),
)
def test_an_evaluation_is_of_the_same_text_and_leaves_no_stale_weights(
    runs: Reference, plugins: tuple[str, ...], config: Settings
) -> None:
    config = {**config, "train.micro_batch": 6}
    evaluated = {**config, "train.evaluate_every": 1, "train.evaluate_batches": 4}
    without, with_ = (runs.train(2, plugins, one)[0] for one in (config, evaluated))
    assert with_["losses"] == without["losses"]
    assert with_["weights"] == without["weights"]
    one = runs.train(1, (), {**evaluated, "train.micro_batch": 2})[0]
    assert with_["evaluations"] == pytest.approx(one["evaluations"], rel=1e-5)


def test_a_head_that_was_called_in_vain_is_gathered_anew(runs: Reference) -> None:
    config, plugins = {"train.micro_batch": 6}, ("shard_cases:Glance",)
    two, one = runs.train(2, plugins, config)[0], runs.train(1, plugins, config)[0]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)


def test_ranks_work_on_data_of_their_own(runs: Reference) -> None:
    config = {"train.micro_batch": 3}
    (first, second), (one,) = runs.train(2, (), config), runs.train(1, (), config)
    assert not set(first["batches"]) & set(second["batches"])
    assert sorted(first["batches"] + second["batches"]) == sorted(one["batches"])


@pytest.mark.parametrize(
    ("world", "plugins", "config", "says"),
    [
        (
            6,
            ("tp", "fsdp2", "shard_cases:Wider"),
            {"parallel.tp": 2},
            "fsdp2 can't shard 'embedding.weight' (259 × 16) over fsdp 3 × tp 2: neither its rows nor its columns",
        ),
        (2, ("ddp", "zero1"), {}, "'ddp' and 'zero1' both fill the slot 'data_parallel'"),
        (2, ("ddp",), {"parallel.tp": 2}, "ddp can't take weights that are split over tp ranks"),
        (2, ("fsdp2",), {"fsdp2.offload": True}, "this run's device is cpu"),
        (2, (), {"parallel.dp_replicate": 3}, "3 × 1 × 1 × 1 = 3, but there are 2 processes"),
    ],
)
def test_refuses_in_one_message(
    runs: Reference, world: int, plugins: tuple[str, ...], config: Settings, says: str
) -> None:
    with pytest.raises(PoolError) as error:
        runs.train(world, plugins, config)
    assert f"rank {world - 1} failed" in str(error.value)
    assert "ConfigError" in str(error.value)
    assert says in str(error.value)


def test_tensors_are_gathered_along_any_axis_and_data_ranks_come_from_the_mesh(ranks: Pool) -> None:
    replies = ranks.run("cases:along_axes", 4)
    pieces = [[rank] * (rank + 1) for rank in range(4)]
    for rank, reply in enumerate(replies):
        beside, across = [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]
        expected = {"": range(4), "tp": beside, "dp_shard": across, "data": across, "dp": across, "efsdp": range(4)}
        assert reply["found"] == {axis: [pieces[one] for one in found] for axis, found in expected.items()}
        assert tuple(reply["data"]) == (rank // 2, 2)
        assert reply["summed"] == sum(across)

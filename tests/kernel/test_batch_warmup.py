"""Smaller batches at the beginning of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_train import ConfigError, Plugin, hookimpl
from forge_train.config.sections import TrainSection, WarmUpBatches
from forge_train_plugins.schedules._curves import in_steps

pytestmark = [pytest.mark.unit]

WARMUP = (WarmUpBatches(steps=3, global_batch=2), WarmUpBatches(steps=2, global_batch=4))
SIZES = [2, 2, 2, 4, 4, 8, 8, 8]
SEQUENCE = 16
PHASES = [{"steps": 3, "global_batch": 2}, {"steps": 2, "global_batch": 4}]


class Seen(Plugin):
    """What every step was made of."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.steps: list[tuple[int, int]] = []
        self.tokens: list[int] = []

    @hookimpl
    def on_step(self, step: Any) -> None:
        self.steps.append(step.data_range)
        self.tokens.append(step.tokens)


def train(**more: Any) -> Any:
    return type("", (), {"train": TrainSection(global_batch=8, sequence=SEQUENCE, batch_warmup=WARMUP, **more)})()


def run(folder: Path, config: Mapping[str, Any] | None = None, **more: Any) -> Any:
    settings = {"train.global_batch": 8, "train.batch_warmup": PHASES, "train.sequence": SEQUENCE, **(config or {})}
    return toys.run(folder, Seen, config=settings, **{"steps": 8, **more})


def test_steps_and_tokens_follow_from_the_sizes() -> None:
    config = train(steps=8).train
    assert [config.batch_at(step) for step in range(8)] == SIZES
    for steps in range(9):
        assert config.steps_of(sum(SIZES[:steps]) * SEQUENCE) == steps
    assert config.steps_of(SEQUENCE) == 0.5
    for tokens in range(1, sum(SIZES) * SEQUENCE):
        steps = train(tokens=tokens).train.total_steps
        assert sum(SIZES[: steps - 1]) * SEQUENCE < tokens <= sum(SIZES[:steps]) * SEQUENCE


@pytest.mark.parametrize("steps", range(1, 8))
def test_lengths_of_schedules_in_tokens_know_the_sizes(steps: int) -> None:
    config = train(steps=8)
    assert in_steps(sum(SIZES[:steps]) * SEQUENCE, "tokens", config) == steps
    assert in_steps(sum(SIZES[-steps:]) * SEQUENCE, "tokens", config, at_end=True) == steps
    assert in_steps(0.5, "tokens", config) == in_steps(4, "steps", config, at_end=True) == 4


def test_every_sequence_is_seen_once_and_in_order(tmp_path: Path) -> None:
    found = run(tmp_path).plugin("seen")
    assert [last - first for first, last in found.steps] == SIZES
    assert [first for first, _ in found.steps] == [sum(SIZES[:step]) for step in range(8)]
    assert found.tokens == [sum(SIZES[: step + 1]) * SEQUENCE for step in range(8)]


def test_micro_batches_change_nothing(tmp_path: Path) -> None:
    whole = run(tmp_path)
    assert whole.job.config.train.micro_batch == 2, "the largest that divides all sizes"
    by_one = run(tmp_path, {"train.micro_batch": 1})
    assert by_one.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.parametrize("stop", [2, 3, 5, 6])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, stop: int) -> None:
    whole = run(tmp_path, name="whole")
    run(tmp_path, name="parts", stop_at=stop)
    assert run(tmp_path, name="parts").numbers == whole.numbers


def test_rolling_back_leaves_out_what_the_steps_would_have_taken(tmp_path: Path) -> None:
    class Back(Plugin):
        @hookimpl
        def on_start(self, job: Any) -> None:
            self.job, self.done = job, False

        @hookimpl
        def on_step(self, step: Any) -> None:
            if step.step == 5 and not self.done:
                self.done = True
                self.job.control.roll_back("a spike", 4)

    settings = {"train.global_batch": 8, "train.batch_warmup": PHASES, "checkpoint.every": 4}
    made = toys.run(tmp_path, Seen, Back, config=settings, steps=6)
    ranges = made.plugin("seen").steps
    assert ranges[4] == (10, 14)
    assert ranges[5] == (10 + 4 + 3 * 8, 10 + 4 + 3 * 8 + 4)


@pytest.mark.parametrize(
    ("phases", "says"),
    [
        ([{"steps": 3, "global_batch": 8}], "expected batches that grow up to train.global_batch, found 8, 8."),
        (PHASES[::-1], "expected batches that grow up to train.global_batch, found 4, 2, 8."),
        ([{"steps": 8, "global_batch": 2}], "8 steps leave none of the run's 8 for the whole batch."),
        ([{"steps": 0, "global_batch": 2}], "batch_warmup.0.steps: expected a number greater than 0, found 0."),
        ([{"steps": 2, "global_batch": 3}], "batch_warmup: 3 is not a multiple of micro_batch × data-parallel ranks"),
        ([{"global_batch": 4}], "batch_warmup.0.steps: is required."),
    ],
)
def test_what_is_no_warm_up_is_refused(tmp_path: Path, phases: Any, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run(tmp_path, {"train.batch_warmup": phases, "train.micro_batch": 2})
    assert f"train.{says.removeprefix('train.')}" in str(refused.value) or f"train.batch_warmup: {says}" in str(
        refused.value
    )


def test_another_warm_up_is_a_change_that_is_asked_for(tmp_path: Path) -> None:
    run(tmp_path, name="run", stop_at=4)
    with pytest.raises(ConfigError, match=r"train\.batch_warmup"):
        run(tmp_path, {"train.batch_warmup": PHASES[:1]}, name="run")
    allowed = {"train.batch_warmup": PHASES[:1], "checkpoint.allow_changes": ["train.batch_warmup"]}
    resumed = run(tmp_path, allowed, name="run").plugin("seen")
    assert [last - first for first, last in resumed.steps] == [8, 8, 8, 8]
    assert resumed.tokens[-1] == (10 + 4 * 8) * SEQUENCE

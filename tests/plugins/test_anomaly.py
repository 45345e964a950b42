"""`anomaly` in one process: what counts as abnormal, and what becomes of the run."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import toys
from forge_train import ConfigError, DivergedError, Plugin, hookimpl
from forge_train.checkpoint.checkpoint import found
from forge_train.run.records import read
from forge_train_plugins.resilience._anomaly.judge import Judge
from forge_train_tools.testing import RunForge, TinyRun, run_forge
from hot_path import Watch, counting, waits
from poison import Poison

pytestmark = [pytest.mark.unit]
SMALL = {"anomaly.warmup": 8, "anomaly.window": 8, "anomaly.threshold": 100.0}


def judge(**values: Any) -> Judge:
    return Judge(**{"threshold": 6.0, "window": 8, "warmup": 8, "keeps_spikes": False, **values})


def test_the_limit_is_the_robust_z_score_of_the_last_steps() -> None:
    one, norms = judge(), [1.0, 1.2, 0.9, 50.0, 1.1, 1.0, 0.8, 1.05]
    assert [one.step(2.0, norm) for norm in norms] == [None] * 8, "within the warm-up"
    bound = statistics.median(norms) + 6 * statistics.median(abs(n - statistics.median(norms)) for n in norms) / 0.6745
    verdict = one.step(2.0, bound * 1.001)
    assert verdict is not None
    assert (verdict.kind, one.in_row) == ("spike", 1)
    assert verdict.text == f"the gradient norm is {bound * 1.001:.4g}, above {bound:.4g}"
    assert one.step(2.0, bound * 0.999) is None
    assert one.in_row == 0
    verdict = one.step(3.0, 0.0)
    assert verdict is not None
    assert verdict.text == "the loss is 3, above 2.018", "a thousandth of the median is the least deviation"


def test_what_is_not_finite_is_abnormal_from_the_first_step() -> None:
    one = judge()
    for loss, norm, text in ((None, 1.0, "loss is"), (1.0, None, "gradient norm is"), (None, None, "loss and the")):
        verdict = one.step(loss, norm)
        assert verdict is not None
        assert verdict.kind == "not_finite"
        assert verdict.text.startswith(f"the {text}")
    assert one.in_row == 3
    assert one.state_dict()["numbers"] == {"loss": [], "gradient norm": []}


@pytest.mark.parametrize("keeps", [False, True])
def test_a_loss_that_stays_high_is_a_spike_for_ever_only_where_it_is_refused(keeps: bool) -> None:
    one = judge(keeps_spikes=keeps)
    for _ in range(8):
        one.step(1.0, 1.0)
    verdicts = [one.step(5.0, 1.0) for _ in range(12)]
    assert all(verdicts[:4])
    assert all(verdicts[4:]) is not keeps


def train(folder: Path, *plugins: Any, steps: int = 12, **config: Any) -> TinyRun:
    settings = {"checkpoint.every": 4, **SMALL, **{key.replace("__", "."): value for key, value in config.items()}}
    return toys.run(folder, "anomaly", Poison, *plugins, steps=steps, config=settings)


def ranges(run: TinyRun) -> list[tuple[int, int]]:
    """Step and number of the global batch, of every step that was taken."""
    return [(step, first // 4) for step, (first, _), _ in run.plugin("poison").steps]


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_each_policy_for_nan(tmp_path: Path, every: int) -> None:
    """At a random step that is neither saved nor, for the second case, logged."""
    at = random.Random(every + 7).choice([5, 7, 10])
    poisoned = {"poison__at": at, "log__every": every}
    clean = toys.run(tmp_path / "clean", Poison, steps=12, config={"log.every": every})

    skipped = train(tmp_path / "skip", anomaly__not_finite="skip", **poisoned)
    assert [step for step, _, was in skipped.plugin("poison").steps if was] == [at]
    assert ranges(skipped) == [(n + 1, n) for n in range(12)]
    assert skipped.finished.outcome == "done"
    until = [line["loss"] for line in clean.metrics if line["step"] <= at]
    assert skipped.losses[: len(until)] == until
    assert skipped.losses[-1] != clean.losses[-1]

    back = train(tmp_path / "back", anomaly__not_finite="roll_back", **poisoned)
    told = next(step for step in range(at, 13) if step % every == 0 or step % 4 == 0)  # logged or about to be saved
    saved = (at - 1) // 4 * 4
    twice = [(n + 1, n) for n in range(saved, at - 1)]
    assert ranges(back) == [*((n + 1, n) for n in range(told)), *twice, *((n + 1, n + 1) for n in range(at - 1, 12))]
    assert back.finished.outcome == "done"
    assert [line["step"] for line in back.metrics] == [line["step"] for line in clean.metrics]
    before = [line for line in back.numbers if line["step"] < at]
    assert before == clean.numbers[: len(before)]

    with pytest.raises(DivergedError, match=rf"diverged at step {at}: the gradient norm is not finite; the backward"):
        train(tmp_path / "stop", **poisoned)
    newest = found(next((tmp_path / "stop").glob("*/checkpoints")))[0]
    assert newest.step == saved, "what is not finite is never saved"

    with pytest.raises(DivergedError, match=r"is nan at step"):
        train(tmp_path / "warn", anomaly__not_finite="warn", **poisoned)


class Jump(toys.ToyData):
    """The toy's data without the batch that begins at sequence 20, for step 6."""

    @hookimpl
    def build_data(self, job: Any, split: str) -> Any:
        loader = super().build_data(job, split)
        if split == "train":
            real = type(loader).__next__

            class Jumping(type(loader)):  # type: ignore[misc]
                def __next__(self) -> Any:
                    self.position += 4 * (self.position == 20)
                    return real(self)

            loader.__class__ = Jumping
        return loader


@pytest.mark.slow
def test_a_rolled_back_run_is_one_that_never_had_the_batch(tmp_path: Path) -> None:
    """Also if it is killed on the way back, or stopped later."""
    back = train(tmp_path / "back", anomaly__not_finite="roll_back", poison__at=6)
    other = toys.run(tmp_path / "other", Jump, steps=12, without=["toy_data"])
    assert back.numbers == other.numbers
    assert [(event["event"], event["step"]) for event in back.events if event["event"] in ("anomaly", "resumed")] == [
        ("anomaly", 6),
        ("anomaly", 6),
        ("resumed", 4),
    ]

    config = {"checkpoint.every": 4, **SMALL, "anomaly.not_finite": "roll_back", "poison.at": 6}
    for stop in (4, 5, 8, 9):
        toys.run(tmp_path / "c", "anomaly", Poison, steps=12, config=config, name=f"s{stop}", stop_at=stop)
        again = {**config, "poison.at": 6 - stop if stop < 6 else 0}
        run = toys.run(
            tmp_path / "c",
            *("anomaly", Poison),
            steps=12,
            config={**again, "checkpoint.allow_changes": ["poison"]},
            name=f"s{stop}",
        )
        assert run.numbers == other.numbers, stop

    class Returns(Plugin):
        """Asks to stop after step 5, when it is done again."""

        @hookimpl
        def on_start(self, job: Any) -> None:
            self.control, self.visits = job.control, 0

        @hookimpl
        def on_step(self, step: Any) -> None:
            self.visits += step.step == 5
            if step.step == 5 and self.visits == 2:
                self.control.stop("between")

    stopped = toys.run(tmp_path / "d", "anomaly", Poison, Returns, steps=12, config=config, name="r")
    assert stopped.finished.step == 5
    config = {**config, "poison.at": 0, "checkpoint.allow_changes": ["poison", "returns"]}
    run = toys.run(tmp_path / "d", "anomaly", Poison, steps=12, config=config, name="r")
    assert run.numbers == other.numbers, "the checkpoint between knows what is left out"


def test_what_is_left_out_is_known_before_the_next_checkpoint_is_saved(tmp_path: Path) -> None:
    """Killed after the roll-back, resumed where nothing is abnormal any more; and looked into afterwards."""

    class Dies(Plugin):
        """Fails at step 5, when it is done again."""

        @hookimpl
        def on_start(self, job: Any) -> None:
            self.control, self.visits = job.control, 0

        @hookimpl
        def on_gradients(self, update: Any) -> None:
            self.visits += update.step == 6
            if self.visits == 2:
                raise RuntimeError("killed")

    other = toys.run(tmp_path / "other", Jump, steps=12, without=["toy_data"])
    config = {"checkpoint.every": 4, **SMALL, "anomaly.not_finite": "roll_back", "poison.at": 6}
    with pytest.raises(RuntimeError, match="killed"):
        toys.run(tmp_path, "anomaly", Poison, Dies, steps=12, config=config, name="r")
    assert [saved.step for saved in found(tmp_path / "r" / "checkpoints")] == [4]
    config = {**config, "poison.at": 0, "checkpoint.allow_changes": ["poison", "dies"]}
    run = toys.run(tmp_path, "anomaly", Poison, steps=12, config=config, name="r")
    assert run.numbers == other.numbers


def test_what_a_spike_got_into_is_not_saved(tmp_path: Path) -> None:
    """Step 10 is saved and not logged, and its spike is finite."""
    run = train(
        tmp_path,
        steps=14,
        anomaly__spike="roll_back",
        poison__at=10,
        poison__factor=1e6,
        log__every=6,
        checkpoint__every=5,
        checkpoint__keep=9,
    )
    assert (10, 10) in ranges(run)
    assert [event["step"] for event in run.events if event["event"] == "resumed"] == [5]
    assert [saved.step for saved in found(run.run / "checkpoints")] == [14, 10, 5]


def test_more_steps_than_the_abnormal_one_are_left_out(tmp_path: Path) -> None:
    run = train(tmp_path, anomaly__not_finite="roll_back", anomaly__batches=3, poison__at=8, log__every=2)
    assert ranges(run) == [
        *((n + 1, n) for n in range(8)),
        *((n + 1, n) for n in range(4, 5)),
        *((n + 1, n + 3) for n in range(5, 12)),
    ]
    with pytest.raises(ConfigError, match="has no effect where neither"):
        train(tmp_path / "b", anomaly__batches=2)


def test_spikes_under_each_policy(tmp_path: Path) -> None:
    spiked = {"poison__at": 10, "poison__factor": 1e5, "train__clip_norm": 0.0}
    warned = train(tmp_path / "a", **spiked)
    (event,) = [event for event in warned.events if event["event"] == "anomaly"]
    assert (event["step"], event["kind"]) == (10, "spike")
    assert "; embedding.weight on rank 0 has the largest gradient" in event["reason"]
    assert warned.finished.outcome == "done"
    assert train(tmp_path / "b", anomaly__spike="skip", **spiked).plugin("poison").steps[9][2]
    with pytest.raises(DivergedError, match="diverged at step 10: the gradient norm is"):
        train(tmp_path / "c", anomaly__spike="stop", **spiked)


def test_too_many_in_a_row(tmp_path: Path) -> None:
    class Always(Poison):
        @hookimpl
        def on_gradients(self, update: Any) -> None:
            if update.step > 2:
                update.scale(float("nan"))

    with pytest.raises(DivergedError, match=r"at step 6, after 3 skipped steps in a row \(anomaly.most\)"):
        toys.run(
            tmp_path / "skip",
            *("anomaly", Always),
            config={**SMALL, "anomaly.not_finite": "skip", "anomaly.most": 3},
            steps=9,
        )


def test_no_checkpoint_to_go_back_to(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"asked to roll back \(step 3: .*the run has no checkpoint of a step"):
        train(tmp_path, anomaly__not_finite="roll_back", poison__at=3)


def test_the_batch_and_the_parameter_are_kept(tmp_path: Path) -> None:
    run = train(tmp_path, anomaly__not_finite="skip", poison__at=7, poison__parameter="layers.1.up")
    folder = run.run / "artifacts" / "anomaly"
    tensors = load_file(folder / "step-00000007-sequence-24-data-0.safetensors")
    assert sorted(tensors) == [f"{n}.{name}" for n in range(2) for name in ("inputs", "labels", "sample_ids")]
    assert [tensors[f"{n}.sample_ids"].tolist() for n in range(2)] == [[24, 25], [26, 27]]
    loader = toys.ToyLoader(run.job, True, 0)
    expected = [loader.batch(torch.arange(first, first + 2)) for first in (24, 26)]
    assert all(torch.equal(tensors[f"{n}.inputs"], batch.inputs) for n, batch in enumerate(expected))
    assert all(torch.equal(tensors[f"{n}.labels"], batch.labels) for n, batch in enumerate(expected))
    told = json.loads((folder / "step-00000007-sequence-24.json").read_text())
    assert told["suspects"]["0"]["name"] == "layers.1.up.weight"
    (event,) = [event for event in run.events if event["event"] == "anomaly"]
    assert event["reason"].endswith("; the backward pass met it first in layers.1.up.weight, on rank 0")
    assert len(list(read(run.run / "artifacts" / ".recorded" / "rank-0.jsonl"))) == 2
    none = train(tmp_path / "none", anomaly__not_finite="skip", anomaly__kept=0, poison__at=7)
    assert not (none.run / "artifacts").exists()


def test_a_run_is_resumed_exactly(run_forge: RunForge) -> None:
    config = {**SMALL, "anomaly.spike": "skip", "poison.at": 11, "poison.factor": 1e7, "log.every": 3}
    config["poison.parameter"] = "layers.1"
    whole = run_forge(["anomaly", Poison], config, steps=14, name="whole")
    run_forge(["anomaly", Poison], config, steps=14, name="stopped", stop_at=10)
    again = {**config, "poison.at": 1, "checkpoint.allow_changes": ["poison"]}
    resumed = run_forge(["anomaly", Poison], again, steps=14, name="stopped")
    assert [step for step, _, was in whole.plugin("poison").steps if was] == [11]
    assert resumed.numbers == whole.numbers
    assert resumed.plugin("anomaly").state_dict() == whole.plugin("anomaly").state_dict()


def test_nothing_is_read_between_logged_steps(tmp_path: Path) -> None:
    with counting(4) as reads:
        run_forge(["anomaly", Watch], {"log.every": 4, **SMALL}, steps=12, folder=tmp_path)
    assert waits(reads) == {}
    with counting(4) as reads:
        run_forge(["anomaly", Watch], {"log.every": 4, "anomaly.spike": "skip"}, steps=12, folder=tmp_path / "skip")
    assert sum(waits(reads).values()) == len([2, 3, 6, 7, 10, 11]), "one in each of them, to veto the step or not"


def test_fp16_is_left_to_the_loss_scale(tmp_path: Path) -> None:
    config = {"train.precision": "fp16", "log.every": 1, "loss_scaler.initial": 2.0**24}
    run = run_forge(["anomaly"], config, steps=6, folder=tmp_path)
    assert run.finished.outcome == "done"
    assert not [event for event in run.events if event["event"] == "anomaly"]

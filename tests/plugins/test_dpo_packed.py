"""Several preference pairs in a row: losses and gradients are those of pairs that have rows for themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_train import MASKED, Batch, ConfigError
from forge_train_plugins.tasks._dpo import METRICS, AnswerPairs
from forge_train_plugins.tasks.dpo import DPO
from forge_train_tools import plan
from forge_train_tools.offline.opening import open_model
from forge_train_tools.testing import RunForge, TinyRun
from forge_train_tools.testing import run_forge as run_once
from preference_data import RECORDS, job, opened, write
from test_dpo import CASES, answers, trained

pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]
VOCABULARY = 352


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """A model and a reference in fp64."""
    found, folder = [], tmp_path_factory.mktemp("models")
    for seed in (1, 2):
        settings = {
            "train.sequence": 128,
            "decoder.vocabulary": VOCABULARY,
            "decoder.max_sequence": 128,
            "run.seed": seed,
        }
        run = run_once([], settings, steps=1, folder=folder / str(seed)).run
        model = open_model(run, text=False).model
        for part in model.parts:
            part.double().requires_grad_(seed == 1)
        found.append(model)
    return found


def alone(batch: Batch) -> Batch:
    """The same answers, each in a row of its own."""
    rows: list[list[Tensor]] = []
    member, numbers, length = batch.targets["member"], batch.targets["answers"], batch.inputs.shape[1]
    for row, number in (member >= 0).nonzero().tolist():
        own = numbers[row] == number
        size = int(own.sum())
        inputs, labels = torch.zeros(length, dtype=torch.int64), torch.full((length,), MASKED)
        inputs[:size], labels[:size] = batch.inputs[row][own], batch.labels[row][own]
        places = torch.arange(length)
        rows.append([inputs, labels, places, (places >= size).long()])
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    return Batch(*columns, targets={"member": torch.arange(len(rows)) % 2})


def relative(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, 40])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_pairs_in_rows_of_their_own(
    here: Path, models: list[Any], monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    """Of the paper's formula, parameter by parameter, all in fp64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    write(here, *RECORDS["packed"])
    batch = next(opened(here, "packed").build_data(job(here, micro_batch=3, sequence=128), "train"))
    rows = alone(batch)
    assert len(rows.inputs) > 2 * len(batch.inputs)
    assert (batch.targets["member"] < 0).any()  # rows of unlike many pairs
    (options, formula), (model, reference) = CASES[name], models
    options, sft_weight = {**options, "chunk": chunk}, 0.0 if options.get("loss") == "orpo" else 0.3
    compares = options.get("loss", "sigmoid") in ("sigmoid", "ipo")
    dist = SimpleNamespace(layout=SimpleNamespace(cp=1))
    run: Any = SimpleNamespace(models={"reference": reference} if compares else {}, dist=dist)
    task = AnswerPairs(run, DPO.Config(**options, sft_weight=sft_weight), lambda: None)  # type: ignore[arg-type]
    weights = dict(model.parts[0].named_parameters())

    loss = task.loss(model.parts[-1], model(batch.inputs, **batch.model_inputs()), batch)
    found = torch.autograd.grad(loss, [*weights.values()])
    assert task.weight(batch) == task.weight(rows) == len(rows.inputs) // 2

    mine, theirs = (
        answers(one.parts[-1].get_submodule("head"), one(rows.inputs, **rows.model_inputs()), rows.labels)
        for one in models
    )
    expected = torch.zeros((), dtype=torch.float64)
    for at in range(0, len(mine), 2):
        pair = [*mine[at : at + 2], *theirs[at : at + 2]]
        expected = expected + formula(*(one / count if task.config.length_normalised else one for one, count in pair))
        expected = expected - sft_weight * mine[at][0] / mine[at][1]
    wanted = torch.autograd.grad(expected, [*weights.values()])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for key, one, other in zip(weights, found, wanted, strict=True):
        assert relative(one, other) < 1e-10, key


def test_rows_that_do_not_count_change_nothing(here: Path, models: list[Any]) -> None:
    write(here, *RECORDS["packed"])
    batch = next(opened(here, "packed").build_data(job(here, micro_batch=3, sequence=128), "train"))
    batch.labels[1], batch.targets["member"][1] = MASKED, -1
    run: Any = SimpleNamespace(models={}, dist=SimpleNamespace(layout=SimpleNamespace(cp=1)))
    task = AnswerPairs(run, DPO.Config(loss="orpo", length_normalised=True), lambda: None)  # type: ignore[arg-type]
    model = models[0]

    def loss(batch: Batch) -> Tensor:
        with torch.no_grad():
            return task.loss(model.parts[-1], model(batch.inputs, **batch.model_inputs()), batch)

    few = [batch.slice("batch", (at, at + 1)) for at in (0, 2)]
    torch.testing.assert_close(loss(batch), loss(few[0]) + loss(few[1]))
    assert task.weight(batch) == sum(map(task.weight, few))


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(run_forge: RunForge, tmp_path: Path) -> str:
    settings = {"train.sequence": 48, "decoder.vocabulary": 320, "decoder.max_sequence": 192}
    return str(run_forge([], settings, steps=2, folder=tmp_path / "base").run)


def packed(run_forge: RunForge, folder: Path, base: str, **more: Any) -> TinyRun:
    more = {"text_pairs__packing": "best_fit", "text_pairs__held_out": 0.0, **more}
    more |= {"train__sequence": 192, "decoder__max_sequence": 192}
    return trained(run_forge, folder, train__init_from=base, adamw__lr=1e-2, **more)


def epoch(run: TinyRun) -> int:
    """The rows of an epoch."""
    found: int = run.job.hooks.build_data("train").epoch  # type: ignore[attr-defined]
    return found


@pytest.mark.slow
def test_runs_over_the_same_pairs_are_the_same(
    run_forge: RunForge, base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each step is of all pairs, so that the order of rows has no effect."""
    rows = epoch(packed(run_forge, tmp_path, base, steps=1, name="count"))
    assert rows <= 64 / 2
    assert re.search(r"text_pairs: \d+\.\d% of the rows is padding \(8\d\.\d% with one text in a row\)", caplog.text)
    one, two = (
        packed(run_forge, tmp_path, base, name=packing, steps=4, text_pairs__packing=packing, train__global_batch=size)
        for packing, size in (("best_fit", rows), ("pad", 128))
    )
    assert one.losses == pytest.approx(two.losses, rel=1e-5)
    assert one.losses[-1] < 0.6
    for key in ("grad_norm", *(f"dpo.{name}" for name in METRICS)):
        got, expected = ([line[key] for line in run.metrics] for run in (one, two))
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-5), key


@pytest.mark.slow
def test_a_packed_run_goes_on_as_if_it_had_not_stopped(run_forge: RunForge, base: str, tmp_path: Path) -> None:
    more = {"steps": 8, "checkpoint__every": 4, "train__micro_batch": 1, "train__evaluate_every": 4}
    more["text_pairs__held_out"] = 0.2
    whole = packed(run_forge, tmp_path, base, **more)
    packed(run_forge, tmp_path, base, **more, name="r", stop_at=4)
    resumed = packed(run_forge, tmp_path, base, **more, name="r")
    assert resumed.numbers == whole.numbers
    assert plan(whole.run / "config.toml").memory.activations  # of imagined rows
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    other: dict[str, Any] = {"text_pairs__packing": "pad", "train__micro_batch": 2, "steps": 9}
    other["checkpoint__allow_changes"] = ["text_pairs.packing", "train.micro_batch"]
    with pytest.raises(ConfigError, match=r"a setting of \[text_pairs\] changed"):
        packed(run_forge, tmp_path, base, **{**more, **other}, name="r")


@pytest.mark.slow
def test_a_stored_reference_knows_the_answers_of_packed_rows(run_forge: RunForge, base: str, tmp_path: Path) -> None:
    more = {"steps": 4, "train__evaluate_every": 2, "text_pairs__held_out": 0.2, "dpo__loss": "ipo"}
    live = packed(run_forge, tmp_path, base, **more)
    first, second = (
        packed(run_forge, tmp_path, base, **more, name=name, dpo__stored=str(tmp_path / "packed.json"))
        for name in ("first", "second")
    )
    assert set(first.job.models) == {"reference"}
    assert not second.job.models
    assert second.losses == first.losses == pytest.approx(live.losses, rel=1e-5)
    file = tmp_path / "pad.json"
    packed(run_forge, tmp_path, base, **more, name="pad", dpo__stored=str(file), text_pairs__packing="pad")
    one, other = (json.loads(path.read_text())["log_probabilities"] for path in (tmp_path / "packed.json", file))
    assert len(one) == 2 * 64
    assert one == pytest.approx(other, rel=1e-5)
    with pytest.raises(
        ConfigError, match=r"dpo\.stored: .*pad\.json was computed from other train data, or .* packing"
    ):
        packed(run_forge, tmp_path, base, **more, name="other", dpo__stored=str(file))

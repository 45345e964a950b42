"""`train.epochs`: the number of steps follows from how much data there is, before the first one."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import toys
from forge_train import MASKED, ConfigError, Plugin, hookimpl
from forge_train.config.sections import TrainSection, WarmUpBatches
from forge_train.plugin.job import Hooks
from forge_train_kit.data.loader import StreamLoader
from forge_train_kit.data.paired import Paired
from forge_train_kit.data.rows import Arrays
from forge_train_plugins.observers._console.board import Board
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.evaluate import evaluate
from forge_train_tools.testing import run_forge

pytestmark = [pytest.mark.unit]

OPEN = {"train.steps": 0, "train.evaluate_every": 0}


class Sized(toys.ToyData):
    """Third-party data of 10 sequences."""

    epoch: int | None = 10

    @hookimpl
    def build_data(self, job: Any, split: str) -> Any:
        loader: Any = toys.ToyLoader(job, self.config.mask, 0)
        loader.epoch = self.epoch
        return loader


class Silent(Sized):
    epoch = None


class Lengths(Plugin):
    """The length of the run, as the schedule is told."""

    api = (1, 0)
    told: int = 0

    @hookimpl
    def lr_schedule(self, optimizer: Any, job: Any) -> Any:
        self.told = job.steps
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / job.steps)


def run(folder: Path, data: type[Plugin] = Sized, config: Mapping[str, Any] | None = None, **more: Any) -> Any:
    return run_forge(
        [toys.ToyModel, data, Lengths],
        {"train.steps": 0, "train.epochs": 2, "train.global_batch": 4, **(config or {})},
        folder=folder,
        **more,
    )


def chats(folder: Path, count: int = 13) -> dict[str, Any]:
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}?", "completion": f"{n}!"}) + "\n" for n in range(count)))
    return {"sft.path": str(file), "sft.cache": str(folder / "cache"), "sft.template": "plain", "sft.held_out": 0}


def test_third_party_data_says_how_much_there_is(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert (done.finished.step, done.job.steps) == (5, 5)
    assert next(one for one in done.job.hooks.plugins.values() if isinstance(one, Lengths)).told == 5
    written = (done.run / "config.toml").read_text()
    assert "epochs = 2.0" in written
    assert "steps = 0" in written, "another amount of data gives another number"
    assert Board.of(done.job, done.model).size.count("2 epochs = 5 steps of") == 1
    assert run(tmp_path, config={"train.epochs": 0.1}).finished.step == 1


@pytest.mark.parametrize("zero", ["0", "0.0", "0.00", "0e0", "-0", 0, 0.0])
def test_no_epochs_leave_the_length_of_a_preset(zero: Any) -> None:
    set_, sections = ((f"train.epochs={zero}",), {}) if isinstance(zero, str) else ((), {"train": {"epochs": zero}})
    request = Request(config="quickstart", set=set_, sections=sections, sections_from="a test")
    assert resolve(request).config.train.steps == resolve(Request(config="quickstart")).config.train.steps > 0


class Empty(Sized):
    epoch = 0


def test_data_without_a_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^train.epochs: the training data of plugin 'empty' has no sequences\.$"):
        run(tmp_path, Empty)


def test_messages_name_the_key_of_the_runs_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, name="a")
    with pytest.raises(
        ConfigError, match=r"the run had finished before: 5 steps\. Train longer with -s train.epochs=…"
    ):
        run(tmp_path, name="a")
    with pytest.raises(ConfigError, match=r"is of step 5, and the run would end at step 3 \(train\.epochs\)"):
        run(tmp_path, name="a", config={"train.epochs": 1})
    with pytest.raises(ConfigError, match=r"this run ends at 5; raise train\.epochs\.$"):
        run(tmp_path, resume=str(tmp_path / "a" / "checkpoints" / "step-00000005"))
    run(tmp_path, name="a", config={"train.epochs": 3})
    assert "The number of steps (train.epochs) was 5 and is 8: the learning-rate schedule is laid over" in caplog.text


def test_an_evaluation_opens_no_training_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {**OPEN, **chats(tmp_path), "train.epochs": 1, "sft.packing": "pad", "sft.held_out": 0.3}
    done = run_forge(["sft"], asked, folder=tmp_path)
    opened: list[str] = []
    build = Hooks.build_data
    monkeypatch.setattr(Hooks, "build_data", lambda self, split: [opened.append(split), build(self, split)][1])
    assert evaluate(done.run).loss > 0
    assert opened == ["validation"]


def test_data_of_unknown_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.epochs: plugin 'silent' does not say how many sequences"):
        run(tmp_path, Silent)
    asked = {**OPEN, "train.epochs": 1}
    with pytest.raises(ConfigError, match="train.epochs: plugin 'synthetic' does not say"):
        run_forge(["synthetic"], {**asked, "synthetic.vocabulary": 64}, folder=tmp_path)
    with pytest.raises(ConfigError, match="train.epochs: a mixture has no epochs"):
        run_forge(["mixture"], {**asked, "mixture.sources": [{"path": str(tmp_path)}]}, folder=tmp_path)
    with pytest.raises(ConfigError, match="train.epochs: the size of a stream is unknown"):
        run_forge(["hf_datasets"], {**asked, "hf_datasets": {"path": "json", "streaming": True}}, folder=tmp_path)


@pytest.mark.parametrize(("given", "found"), [("steps", "steps and epochs"), ("tokens", "tokens and epochs")])
def test_two_lengths_are_refused(given: str, found: str) -> None:
    asked = ("train.steps=0", f"train.{given}=5", "train.epochs=1")
    with pytest.raises(ConfigError, match=rf"train.steps: say how long to train, .*; found {found}\.") as refused:
        resolve(Request(config="quickstart", set=asked))
    assert len(str(refused.value).splitlines()) == 1


def test_epochs_replace_the_length_of_a_preset(tmp_path: Path) -> None:
    asked = ("train.epochs=2", "train.evaluate_every=0", *(f"{key}={value}" for key, value in chats(tmp_path).items()))
    request = Request(config="quickstart", plugins=("sft",), without=("sample",), set=(*asked, "sft.packing=pad"))
    setup = resolve(request)
    assert (setup.config.train.steps, setup.config.train.epochs) == (4, 2.0)
    assert resolve(request, measured=False).config.train.steps == 0, "the data was not opened"


def test_checks_know_the_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cosine.warmup: 7 steps leave none of the run's 5 steps"):
        run_forge(
            [toys.ToyModel, Sized],
            {"train.steps": 0, "train.epochs": 2, "cosine": {"warmup": 7, "unit": "steps"}},
            folder=tmp_path,
        )


def test_what_sft_says_before_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forge_train")
    done = run_forge(["sft"], {**OPEN, **chats(tmp_path), "train.epochs": 2, "sft.packing": "pad"}, folder=tmp_path)
    assert done.finished.step == 7
    assert "13 rows an epoch; 2 epochs = 7 steps in this run" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["text", "tokens", "text_labels"])
def test_built_in_data_says_how_much_there_is(tmp_path: Path, plugin: str) -> None:
    more: dict[str, Any] = {"train.epochs": 1}
    plugins: list[Any] = [plugin]
    if plugin == "tokens":
        import numpy as np

        np.save(tmp_path / "t.npy", np.append(np.arange(1000, dtype=np.uint16) % 250, 256).astype(np.uint16))
        more |= {"tokens.path": str(tmp_path / "t.npy"), "tokens.isolate": False, "tokens.held_out": 0}
    if plugin == "text_labels":
        lines = (json.dumps({"text": f"{n} words", "label": str(n % 2)}) for n in range(10))
        (tmp_path / "labels.jsonl").write_text("\n".join(lines))
        more |= {
            "text_labels": {
                "path": str(tmp_path / "labels.jsonl"),
                "cache": str(tmp_path),
                "held_out": 0.0,
                "packing": "pad",
            }
        }
        more["classify.classes"] = ["0", "1"]
        plugins.append("classify")
    done = run_forge(plugins, {**OPEN, **more}, folder=tmp_path)
    rows = {"tokens": 1000 // 32, "text_labels": 10}.get(plugin)
    assert rows is None or done.finished.step == -(-rows // 4)
    assert done.finished.step > 1


class Numbered:
    count, digest = 10, "d"

    def read(self, rows: Any) -> Arrays:
        return Arrays(rows[:, None].repeat(2, 1), rows[:, None].repeat(2, 1).copy())

    def where(self, row: int) -> str:
        return str(row)


def test_padding_never_parts_a_pair() -> None:
    """5 pairs × 0.3 are 3 sequences: two pairs are read whole."""
    train = TrainSection(steps=1, epochs=0.3, global_batch=6, micro_batch=6, sequence=2)
    dist = SimpleNamespace(data_rank=0, data_ranks=1)
    job: Any = SimpleNamespace(config=SimpleNamespace(train=train), dist=dist, device=torch.device("cpu"), steps=1)
    batch = next(StreamLoader(Paired(Numbered(), 0, key="x"), job, target="member"))
    assert batch.targets["member"].tolist() == [0, 1, 0, 1, -1, -1]
    assert (batch.labels == MASKED).all(1).tolist() == [False] * 4 + [True] * 2


def test_smaller_batches_at_first_take_more_steps() -> None:
    train = TrainSection(epochs=1, global_batch=8, batch_warmup=(WarmUpBatches(steps=3, global_batch=2),))
    assert train.sequences_of(15) == 15
    assert -(-train.steps_of(15 * train.sequence) // 1) == 5  # 2, 2, 2, 8 and one of the last 8

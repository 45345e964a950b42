"""Distillation against its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakes
import forge_cli
from forge_train import MASKED, Batch, ConfigError
from forge_train_kit.model import Linear
from forge_train_plugins.tasks._cross_entropy import ChunkedCrossEntropy
from forge_train_plugins.tasks._distill.task import Distillation
from forge_train_tools.testing import RunForge

pytestmark = [pytest.mark.unit]

WORDS, DIM = 19, 8


class Teacher:
    """Twice as wide as the student."""

    def __init__(self, words: int = WORDS) -> None:
        self.embedding = nn.Embedding(WORDS, 2 * DIM)
        head: nn.Module = fakes.initialised(Linear(2 * DIM, words))
        self.parts = [nn.ModuleDict({"head": head}).requires_grad_(False).eval()]

    def __call__(self, inputs: Tensor) -> Any:
        return self.embedding(inputs).detach()


def case() -> tuple[nn.ModuleDict, Tensor, Batch]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 10, DIM, generator=generator).requires_grad_()
    inputs, labels = (torch.randint(0, WORDS, (3, 10), generator=generator) for _ in range(2))
    labels[0, :4] = labels[-1, -1] = MASKED
    return nn.ModuleDict({"head": fakes.initialised(Linear(DIM, WORDS))}), hidden, Batch(inputs, labels)


def distillation(
    share: float = 0.5, temperature: float = 1.0, chunk: int = 0, words: int = WORDS, divergence: Any = "forward"
) -> Any:
    torch.manual_seed(1)
    models: Any = {"teacher": Teacher(words)}
    return Distillation(ChunkedCrossEntropy(), models, share, temperature, chunk, divergence)


@pytest.mark.parametrize(("share", "temperature"), [(0.5, 1.0), (1.0, 1.0), (0.3, 2.0), (1.0, 0.5)])
@pytest.mark.parametrize("chunk", [0, 4, 1000])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jensen_shannon"])
def test_loss_and_gradients_are_those_of_the_definition(
    share: float, temperature: float, chunk: int, kind: str
) -> None:
    part, hidden, batch = case()
    task = distillation(share, temperature, chunk, divergence=kind)
    loss = task.loss(part, hidden, batch)
    found = torch.autograd.grad(loss, [hidden, *part.parameters()])
    kept, teacher = batch.labels != MASKED, task.models["teacher"]
    mine = part["head"].double()(hidden.double())[kept]
    taught = teacher.parts[0]["head"].double()(teacher(batch.inputs).double())[kept]
    student, master = ((one / temperature).softmax(-1) for one in (mine, taught))
    middle = (student + master) / 2
    divergence = {
        "forward": F.kl_div(student.log(), master, reduction="sum"),
        "reverse": F.kl_div(master.log(), student, reduction="sum"),
        "jensen_shannon": sum(F.kl_div(middle.log(), one, reduction="sum") for one in (student, master)) / 2,
    }[kind]
    expected = share * temperature**2 * divergence + (1 - share) * F.cross_entropy(
        mine, batch.labels[kept], reduction="sum"
    )
    wanted = torch.autograd.grad(expected, [hidden, *part.parameters()])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-4, atol=1e-5)
    assert task.weight(batch) == int(kept.sum())


def test_evaluation_is_the_loss_of_labels_alone() -> None:
    part, hidden, batch = case()
    assert distillation().loss(part.eval(), hidden, batch).item() == pytest.approx(
        ChunkedCrossEntropy()(hidden, part["head"], batch.labels).item()
    )


def test_another_vocabulary_is_told() -> None:
    part, hidden, batch = case()
    with pytest.raises(
        ConfigError, match="the teacher's vocabulary has 20 tokens, but the student's has 19; they must be"
    ):
        distillation(words=20).loss(part, hidden, batch)


@pytest.mark.slow
def test_a_student_comes_near_its_teacher_and_resumes(run_forge: RunForge, tmp_path: Path) -> None:
    teacher = run_forge([], {"decoder.layers": 3, "train.clip_norm": 0}, steps=30, folder=tmp_path / "teacher")
    settings = {
        "distill.weights": str(teacher.run),
        "distill.teacher": {"decoder": {"layers": 3}},
        "distill.share": 1.0,
        "checkpoint.every": 2,
    }
    whole = run_forge(["distill"], settings, steps=30, folder=tmp_path / "whole")
    assert whole.losses[-1] < 0.5 * whole.losses[0]
    assert [line["distill.divergence"] for line in whole.metrics] == pytest.approx(whole.losses, rel=1e-5)
    for mine, other in zip(whole.job.models["teacher"].parameters(), teacher.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    short = run_forge(["distill"], settings, steps=4, folder=tmp_path / "short")
    run_forge(["distill"], settings, steps=4, folder=tmp_path / "parts", name="r", stop_at=2)
    resumed = run_forge(["distill"], settings, steps=4, folder=tmp_path / "parts", name="r")
    for mine, other in zip(resumed.model.parameters(), short.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_teacher_knows_nothing_of_what_its_student_freezes(run_forge: RunForge, tmp_path: Path) -> None:
    """A pattern matches the student alone, which has more layers."""
    teacher = run_forge([], {"decoder.layers": 1}, steps=1, folder=tmp_path / "teacher")
    settings = {"distill.weights": str(teacher.run), "distill.teacher": {"decoder": {"layers": 1}}}
    tuned = {"freeze.parameters": ["layers.1.*"]}
    student = run_forge(["distill", "freeze"], settings | tuned, steps=1, folder=tmp_path / "student")
    frozen = [name for name, one in student.model.named_parameters() if not one.requires_grad]
    assert frozen
    assert all(name.startswith("layers.1.") for name in frozen)


def test_without_a_teacher_it_is_refused(run_forge: RunForge) -> None:
    with pytest.raises(ConfigError, match="distill.weights: is required: the teacher's run or its checkpoint."):
        run_forge(["distill"], {}, steps=2)


def test_a_teacher_is_looked_for_before_data(run_forge: RunForge, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(ConfigError, match="short"):
        run_forge([], {"text.path": str(tmp_path / "short.txt")})
    with pytest.raises(
        ConfigError, match=r"'teacher' \(distill\.weights, distill\.teacher\): .*nobody: there is no such"
    ):
        run_forge(["distill"], {"distill.weights": "nobody", "text.path": str(tmp_path / "short.txt")})


@pytest.mark.slow
def test_a_student_writes_and_is_evaluated_and_its_teacher_may_move(tmp_path: Path) -> None:
    settings = {"train.steps": 2, "train.global_batch": 2, "train.sequence": 32, "decoder.layers": 1, "decoder.dim": 32}
    options = [part for key, value in settings.items() for part in ("-s", f"{key}={value}")]
    config = tmp_path / "small.toml"
    config.write_text("")
    into = ("--run-dir", tmp_path)
    assert forge_cli.forge("train", config, *into, "--name", "teacher", *options).code == 0
    taught = ("-p", "distill", "-s", f"distill.weights={tmp_path / 'teacher'}")
    assert forge_cli.forge("train", config, *into, "--name", "student", *options, *taught).code == 0
    student = tmp_path / "student"
    assert forge_cli.forge("generate", student, "--prompt", "a", "--tokens", 3).code == 0
    assert forge_cli.forge("eval", student, "-s", "train.evaluate_batches=1").code == 0
    wide = (*options, *taught, "-s", "decoder.dim=64")
    assert forge_cli.forge("train", config, *into, "--name", "wide", *wide).code == 0, "the teacher keeps its own width"
    other = (*wide, "-s", "distill.teacher.decoder.dim=64")
    message = forge_cli.one_message(forge_cli.forge("train", config, *into, "--name", "other", *other), 2)
    assert message.startswith("The weights of the extra model 'teacher' (distill.weights, distill.teacher): ")
    assert "holds another model" in message
    (tmp_path / "teacher").rename(tmp_path / "moved")
    more = ("--resume", student, "-s", "train.steps=3")
    message = forge_cli.one_message(forge_cli.forge("train", *more), 2)
    assert message.startswith("The weights of the extra model 'teacher' (distill.weights, distill.teacher): ")
    there = ("-s", f"distill.weights={tmp_path / 'moved'}", "-s", 'checkpoint.allow_changes=["distill.weights"]')
    assert forge_cli.forge("train", *more, *there).code == 0

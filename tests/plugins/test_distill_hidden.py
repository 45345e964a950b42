"""Hidden states that a student learns from its teacher."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import MASKED, ConfigError, Model
from forge_train_plugins.tasks._distill.hidden import HiddenStates
from forge_train_tools.testing import RunForge, TinyRun, run_forge

pytestmark = [pytest.mark.unit]


class Stack(nn.Module):
    """Blocks behind an embedding."""

    def __init__(self, blocks: int, dim: int = 8) -> None:
        super().__init__()
        torch.manual_seed(blocks)
        self.embedding = nn.Embedding(11, dim)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) for _ in range(blocks))
        self.units = [f"layers.{at}" for at in range(blocks)]
        self.roles = {"embedding.weight": "embedding"}

    def forward(self, ids: Tensor) -> list[Tensor]:
        found = [self.embedding(ids)]
        for layer in self.layers:
            found.append(layer(found[-1]))
        return found


JOB: Any = SimpleNamespace()


def states(pairs: dict[str, str], kind: Any = "mse", student: int = 2, teacher: int = 6) -> tuple[Any, Stack, Stack]:
    mine, theirs = Stack(student), Stack(teacher)
    return HiddenStates([*pairs.items()], kind, Model([mine]), Model([theirs]), JOB), mine, theirs


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_loss_and_gradients_are_those_of_the_definition(kind: str) -> None:
    found, student, teacher = states({"layers.0": "layers.2", "layers.1": "layers.5", "embedding": "embedding"}, kind)
    ids = torch.arange(20).view(2, 10) % 11
    labels = ids.clone()
    labels[0, :3] = MASKED
    mine = student(ids)
    with torch.no_grad():
        theirs = teacher(ids)
    loss = found.loss(labels)
    gradients = torch.autograd.grad(loss, list(student.parameters()))
    mine = student.double()(ids)
    total = torch.zeros((), dtype=torch.float64)
    for one, other in ((1, 3), (2, 6), (0, 0)):
        left, right = mine[one][labels != MASKED], theirs[other][labels != MASKED].double()
        if kind == "mse":
            total = total + F.mse_loss(left, right, reduction="none").mean(1).sum() / 3
        else:
            total = total + (1 - (left * right).sum(1) / left.norm(dim=1) / right.norm(dim=1)).sum() / 3
    wanted = torch.autograd.grad(total, list(student.parameters()))
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    for found_one, wanted_one in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found_one, wanted_one.float(), rtol=1e-4, atol=1e-6)


def test_a_pattern_spreads_the_layers_over_the_teachers() -> None:
    assert states({"layers.*": "layers.*"})[0].pairs == [("layers.0", "layers.2"), ("layers.1", "layers.5")]
    found, _, _ = states({"layers.*": "layers.*"}, student=3, teacher=4)
    assert [other for _, other in found.pairs] == ["layers.1", "layers.2", "layers.3"]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            {"block.*": "layers.*"},
            r"distill\.hidden: the student has no embedding or block 'block\.\*'; it has embedding",
        ),
        ({"layers.*": "layers.9"}, r"distill\.hidden: the teacher has no embedding or block 'layers\.9'; it has embed"),
        ({"layers.0.0": "layers.1"}, r"distill\.hidden: the student has no embedding or block 'layers\.0\.0'"),
        (
            {"layers.*": "layers.1"},
            r"'layers\.\*' names 2 modules of the student, but 'layers\.1' only 1 of the teacher",
        ),
    ],
)
def test_modules_that_are_not_there_are_told(pairs: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        states(pairs)


# -- a run -----------------------------------------------------------------------------------------------------------

LAYERS = [["layers.*", "layers.*"]]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    deep = {"decoder.layers": 4, "adamw.lr": 1e-2}
    return str(run_forge([], deep, steps=12, folder=tmp_path_factory.mktemp("teacher")).run)


def trained(run_forge: RunForge, teacher: str, folder: Path, plugins: tuple[str, ...] = (), **more: Any) -> TinyRun:
    values: dict[str, Any] = {
        "distill__weights": teacher,
        "distill__teacher": {"decoder": {"layers": 4}},
        "train__evaluate_every": 4,
    }
    values = {key.replace("__", "."): value for key, value in {**values, "adamw__lr": 1e-2, **more}.items()}
    name, stop_at = str(values.pop("name", "")), values.pop("stop_at", None)
    steps = int(values.pop("steps", 8))
    return run_forge(["distill", *plugins], values, steps=steps, folder=folder, name=name, stop_at=stop_at)


@pytest.mark.parametrize("kind", ["mse", "cosine"])
def test_hidden_states_come_near_and_the_loss_counts_them(
    run_forge: RunForge, teacher: str, tmp_path: Path, kind: str
) -> None:
    alone: dict[str, Any] = {"distill__hidden": LAYERS, "distill__hidden_loss": kind, "distill__share": 1.0}
    run = trained(run_forge, teacher, tmp_path, steps=30, distill__hidden_weight=20.0, **alone)
    before, after = (
        [one["metrics"]["distill.hidden"] for one in run.events if one["event"] == "evaluation"][at] for at in (0, -1)
    )
    assert after < 0.8 * before
    for line in (run.metrics[0], run.metrics[-1]):
        assert line["loss"] == pytest.approx(line["distill.divergence"] + 20 * line["distill.hidden"], rel=1e-5)


def test_recomputed_layers_learn_the_same_and_a_run_repeats(run_forge: RunForge, teacher: str, tmp_path: Path) -> None:
    plain = trained(run_forge, teacher, tmp_path / "a", distill__hidden=LAYERS, checkpoint__every=4)
    again = trained(run_forge, teacher, tmp_path / "b", ("ac",), distill__hidden=LAYERS, ac__mode="full")
    assert again.losses == pytest.approx(plain.losses, rel=1e-6)
    trained(run_forge, teacher, tmp_path / "c", distill__hidden=LAYERS, checkpoint__every=4, name="r", stop_at=4)
    resumed = trained(run_forge, teacher, tmp_path / "c", distill__hidden=LAYERS, checkpoint__every=4, name="r")
    for mine, other in zip(resumed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"distill__hidden_loss": "cosine"}, r"distill\.hidden_loss: has no effect without distill\.hidden\."),
        ({"distill__hidden_weight": 2.0}, r"distill\.hidden_weight: has no effect without distill\.hidden\."),
        (
            {"distill__hidden": LAYERS, "distill__stored": "logits", "distill__top_k": 3},
            r"distill\.hidden: needs the teacher beside the student; leave distill\.stored out\.",
        ),
        (
            {"distill__hidden": [["layers.*", "layer.*"]]},
            r"distill\.hidden: the teacher has no embedding or block 'layer",
        ),
        (
            {"distill__hidden": LAYERS, "decoder__dim": 16},
            r"distill\.hidden: 'layers\.0' of the student gives 16 features, and 'layers\.1' of the teacher 32; they",
        ),
    ],
)
def test_mistakes_are_told(
    run_forge: RunForge, teacher: str, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    layers: dict[str, Any] = {"distill__teacher": {"decoder": {"layers": 4, "dim": 32}}}
    with pytest.raises(ConfigError, match=message):
        trained(run_forge, teacher, tmp_path, **layers, **more)

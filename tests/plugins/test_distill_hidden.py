"""Hidden states that a student learns from its teacher."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import forge_cli
from forge_train import MASKED, ConfigError, Model
from forge_train_kit.model import Linear
from forge_train_plugins.tasks._distill.hidden import HiddenStates, add_projection
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

    def hidden_shape(self, batch: int, sequence: int) -> tuple[int, ...]:
        return batch, sequence, self.embedding.embedding_dim

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
    loss = found.loss(student, labels)
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


@pytest.mark.slow
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


@pytest.mark.slow
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
        ({"distill__hidden_width": 64}, r"distill\.hidden_width: has no effect without distill\.hidden\."),
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
            r"distill\.hidden: 'layers\.0' of the student gives 16 features, and 'layers\.1' of the teacher 32; set d",
        ),
    ],
)
def test_mistakes_are_told(
    run_forge: RunForge, teacher: str, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    layers: dict[str, Any] = {"distill__teacher": {"decoder": {"layers": 4, "dim": 32}}}
    with pytest.raises(ConfigError, match=message):
        trained(run_forge, teacher, tmp_path, **layers, **more)


@pytest.mark.slow
def test_a_narrower_student_learns_a_projection_that_its_export_leaves_out(
    run_forge: RunForge, teacher: str, tmp_path: Path
) -> None:
    """It has one for all pairs, and a run repeats with it."""
    narrow: dict[str, Any] = {
        "distill__teacher": {"decoder": {"layers": 4, "dim": 32, "hidden": 48}},
        "decoder__dim": 16,
    }
    narrow |= {"distill__hidden": LAYERS, "distill__hidden_width": 32, "checkpoint__every": 4}
    run = trained(run_forge, teacher, tmp_path / "a", **narrow)
    projection = run.model.parts[0].get_parameter("hidden_projection.weight")
    assert projection.shape == (32, 16)
    assert id(projection) in {id(one) for group in run.optimizer.param_groups for one in group["params"]}
    assert not [name for name, _ in run.job.models["teacher"].named_parameters() if "projection" in name]
    trained(run_forge, teacher, tmp_path / "b", **narrow, name="r", stop_at=4)
    resumed = trained(run_forge, teacher, tmp_path / "b", **narrow, name="r")
    for mine, other in zip(resumed.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert forge_cli.forge("generate", run.run, "--prompt", "a", "--tokens", 3).code == 0
    assert forge_cli.forge("eval", run.run).code == 0
    ended = forge_cli.forge("checkpoint", "export", run.run, tmp_path / "hf")
    assert ended.code == 0, ended.err
    names = {name for file in (tmp_path / "hf").glob("*.safetensors") for name in load_file(file)}
    assert names
    assert not [name for name in names if "projection" in name]
    start = run_forge([], {"decoder.dim": 16}, steps=1, folder=tmp_path / "start").run
    missing: dict[str, Any] = {"train__init_from": str(start), "train__init_missing": ["hidden_projection.*"]}
    assert trained(run_forge, teacher, tmp_path / "c", **narrow, **missing).losses


def test_a_projection_is_trained_beside_an_adapter(run_forge: RunForge, teacher: str, tmp_path: Path) -> None:
    narrow: dict[str, Any] = {
        "distill__teacher": {"decoder": {"layers": 4, "dim": 32, "hidden": 48}},
        "decoder__dim": 16,
    }
    narrow |= {"distill__hidden": LAYERS, "distill__hidden_width": 32}
    narrow["train__init_from"] = str(run_forge([], {"decoder.dim": 16}, steps=1, folder=tmp_path / "start").run)
    narrow |= {"train__init_missing": ["*lora_*", "hidden_projection.*"]}
    narrow |= {"lora__rank": 4, "checkpoint__only": ["*lora_*", "hidden_projection.*"]}
    run = trained(run_forge, teacher, tmp_path / "a", ("lora",), **narrow)
    names = {name for name, one in run.model.named_parameters() if one.requires_grad}
    assert "hidden_projection.weight" in names
    assert all("lora_" in name or "projection" in name for name in names)


def test_a_projection_has_the_gradient_of_the_definition() -> None:
    student, teacher = Stack(2, 4), Stack(2)
    add_projection(student, 8)
    student.hidden_projection = Linear(4, 8)
    nn.init.normal_(student.hidden_projection.weight)
    found = HiddenStates([("layers.*", "layers.*")], "mse", Model([student]), Model([teacher]), JOB)
    ids = torch.arange(20).view(2, 10) % 11
    student(ids)
    with torch.no_grad():
        theirs = teacher(ids)
    gradients = torch.autograd.grad(found.loss(student, ids), list(student.parameters()))
    mine, project = student.double()(ids), student.hidden_projection
    sums = [F.mse_loss(project(mine[at]), theirs[at].double(), reduction="sum") / 8 for at in (1, 2)]
    total = torch.stack(sums).mean()
    wanted = torch.autograd.grad(total, list(student.parameters()))
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)

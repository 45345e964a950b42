"""A model, data and other plugins so small that a whole run takes some milliseconds. Enable them as `toys:ToyModel`.

Nothing of forge's own model or data takes part: what the tests of core show holds for anybody's plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from forge_train import MASKED, Applied, Batch, Ge, Gt, Init, Model, Phase, Plugin, Transform, hookimpl, section
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train.plugin.job import Job
from forge_train.registry.setup import Setup
from forge_train.run.control import Control
from forge_train.run.run import Run
from forge_train_kit.model import Embedding, Linear, RMSNorm
from forge_train_tools.testing import TinyRun, run_forge
from forge_train_tools.testing.runs import prepared

VOCABULARY, DIM = 23, 8


class Block(nn.Module):
    """A channel mixer on the residual stream, with something of the token before."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim)
        self.up = Linear(dim, 2 * dim, std=0.3)
        self.down = Linear(2 * dim, dim, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        shifted = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        return x + self.down(torch.tanh(self.up(self.norm(x + shifted))))


class Tower(nn.Module):
    """Embedding, blocks and head; `None` and missing layers are holes that a pipeline left."""

    def __init__(self, layers: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding: nn.Module | None = Embedding(VOCABULARY, DIM, std=0.3)
        self.layers = nn.ModuleDict({str(index): Block(DIM) for index in range(layers)})
        self.head: nn.Module | None = Linear(DIM, VOCABULARY, std=0.3)
        if tied:
            self.head.weight = self.embedding.weight

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(f"layers.{index}" for index in self.layers)

    @property
    def roles(self) -> dict[str, str]:
        return {"embedding.weight": "embedding", "head.weight": "head"}

    def forward(self, x: Tensor, **extras: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x


class ToyModel(Plugin):
    """A tower of two blocks."""

    api = (1, 0)

    @section
    class Config:
        layers: Annotated[int, Gt(0)] = 2
        tied: bool = False

    @hookimpl
    def build_model(self, job: Any) -> nn.Module:
        return Tower(self.config.layers, tied=self.config.tied)


class PlacedLoader:
    """Micro-batches of sequences by their places in the global stream; a subclass says what is where."""

    def __init__(self, job: Any) -> None:
        self.job, self.position = job, 0

    def batch(self, places: Tensor) -> Batch:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        size, dist = self.job.config.train.micro_batch, self.job.dist
        first = self.position + dist.data_rank * size
        self.position += size * dist.data_ranks
        return self.batch(torch.arange(first, first + size))

    def state_dict(self) -> dict[str, Any]:
        return {"sequences": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["sequences"]

    def skip(self, sequences: int) -> None:
        self.position += sequences


class ToyLoader(PlacedLoader):
    """Every sequence masks another number of labels."""

    def __init__(self, job: Any, mask: bool, offset: int) -> None:
        super().__init__(job)
        self.mask, self.offset = mask, offset

    def batch(self, places: Tensor) -> Batch:
        length, rows = self.job.config.train.sequence, []
        for index in (places + self.offset).tolist():
            generator = torch.Generator().manual_seed(index)
            start, stride = torch.randint(0, VOCABULARY, (2,), generator=generator).tolist()
            rows.append((start + stride * torch.arange(length + 1)) % VOCABULARY)
            if self.mask:
                rows[-1][1 : 1 + (index * 5) % length] = MASKED
        tokens = torch.stack(rows)
        return Batch(tokens[:, :-1].clamp(min=0), tokens[:, 1:])


class ToyData(Plugin):
    """Arithmetic progressions."""

    api = (1, 0)

    @section
    class Config:
        mask: bool = True

    @hookimpl
    def build_data(self, job: Any, split: str) -> ToyLoader:
        return ToyLoader(job, self.config.mask, 0 if split == "train" else 10**6)


class Bare(Plugin):
    """Has the one hook that a plugin must have, and does nothing in it."""

    @hookimpl
    def on_log(self, record: Any) -> None: ...


class Noise(Plugin):
    """Draws from every global random number generator, so that a run shows whether they are restored."""

    api = (1, 0)

    @section
    class Config:
        scale: Annotated[float, Ge(0)] = 1e-3

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        import random

        import numpy as np

        update.scale(1 + self.config.scale * (float(torch.rand(())) + random.random() + float(np.random.rand())))


class Average(Plugin):
    """Keeps a moving average of the weights, evaluates with it and saves it: state of tensors and of JSON."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Any, model: Model, optimizer: Any) -> None:
        self.model, self.seen = model, 0
        self.average = {name: value.clone() for name, value in model.state_dict().items()}

    @hookimpl
    def on_step(self, step: Any) -> None:
        if step.skipped:
            return
        self.seen += 1
        for name, value in self.model.state_dict().items():
            self.average[name].lerp_(value, 0.3)
        step.add("distance", sum((v - self.average[n]).norm() for n, v in self.model.state_dict().items()))
        step.add("seen", self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        for name, value in state["average"].items():
            self.average[name].copy_(value)


def halves(whole: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A tower cut in two after half of its layers; names stay global."""
    import copy

    memo = {id(parameter): parameter for parameter in whole.parameters()}
    first, second = copy.deepcopy(whole, dict(memo)), copy.deepcopy(whole, dict(memo))
    middle = len(whole.layers) // 2
    for index in list(whole.layers):
        del (second if int(index) < middle else first).layers[index]
    first.head, second.embedding = None, None
    return first, second


class TwoPartExecutor:
    """Runs a tower that was cut in two, part after part."""

    def __init__(self, model: Model, task: Any) -> None:
        self.model, self.task = model, task

    def _loss(self, batch: Batch) -> Tensor:
        hidden = batch.inputs
        for part in self.model.parts:
            hidden = part(hidden)
        return self.task.loss(self.model.parts[-1], hidden, batch)

    def train(self, batches: Sequence[Batch], scale: Tensor | float) -> Tensor:
        total = torch.zeros(())
        for index, batch in enumerate(batches, start=1):
            self.model.on_micro_batch(index == len(batches))
            loss = self._loss(batch)
            torch.autograd.backward(loss * scale)
            total = total + loss.detach()
        return total

    def evaluate(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return self._loss(batch)


class Cut(Plugin):
    """A pipeline of two parts that both lie in this process."""

    api = (1, 0)

    @hookimpl
    def parallelize(self, job: Any) -> Transform:
        def apply(whole: nn.Module) -> Applied:
            parts = list(halves(whole))
            return Applied(parts, ("layers",), "2 parts")

        return Transform(Phase.PIPELINE, "pipeline", apply, covers=("pp",))

    @hookimpl
    def executor(self, model: Model, task: Any, job: Any) -> TwoPartExecutor:
        return TwoPartExecutor(model, task)


class LowRank(nn.Module):
    """A linear with a low-rank addition beside its own weight."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight = base.weight
        self.down = nn.Parameter(torch.empty(rank, base.in_features, device="meta"))
        self.up = nn.Parameter(torch.empty(base.out_features, rank, device="meta"))

    def initial(self, name: str) -> Init:
        return Init("zeros") if name == "up" else Init("normal", 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + x @ self.down.T @ self.up.T


SMALL: dict[str, Any] = {
    "run.device": "cpu",
    "train.global_batch": 4,
    "train.micro_batch": 2,
    "train.sequence": 6,
    "train.evaluate_batches": 2,
    "log.every": 1,
    "checkpoint.every": 0,
}
TOYS = ("toys:ToyModel", "toys:ToyData")
"""What every toy run enables; defaults fill the other slots."""

Wanted = str | type[Plugin]


class Asks(Plugin):
    """Asks something of `job.control` after a step, once."""

    api = (1, 0)
    at: int = 0
    asked = staticmethod(lambda control: None)

    @hookimpl
    def on_start(self, job: Any) -> None:
        self.control, self.done = job.control, False

    @hookimpl
    def on_step(self, step: Any) -> None:
        if step.step == self.at and not self.done:
            self.done = True
            type(self).asked(self.control)


def asks(at: int, asked: Callable[[Any], None]) -> type[Plugin]:
    """A plugin that passes the run's `job.control` to a function after a step, once."""
    return type("AsksOnce", (Asks,), {"at": at, "asked": staticmethod(asked)})


def _own(more: dict[str, Any]) -> list[type[Plugin]]:
    """The toys that `without` does not name; it keeps the rest."""
    own = {"toy_model": ToyModel, "toy_data": ToyData}
    without = more.pop("without", ())
    more["without"] = [name for name in without if name not in own]
    return [toy for name, toy in own.items() if name not in without]


def run(
    folder: Path, *plugins: Wanted, steps: int = 4, config: Mapping[str, Any] | None = None, **more: Any
) -> TinyRun:
    """A toy run in this process; `more` as for `run_forge`. Checkpoints elsewhere are the plugin `copies`'."""
    elsewhere = {"checkpoint.folder", "checkpoint.mirror"} & (config or {}).keys()
    wanted = [*_own(more), *plugins, *(["copies"] if elsewhere else [])]
    return run_forge(wanted, {**SMALL, **(config or {})}, steps=steps, preset="", folder=folder, **more)


def setup(*plugins: Wanted, folder: Path, config: Mapping[str, Any] | None = None, **more: Any) -> Setup:
    """A toy run, resolved."""
    wanted = [*_own(more), *plugins]
    with prepared(wanted, {**SMALL, **(config or {})}, preset="", folder=folder, **more) as made:
        return made


@contextmanager
def job(*plugins: Wanted, folder: Path, world: Layout | None = None, **more: Any) -> Iterator[Job]:
    """A job that could be composed, with nothing written."""
    made = setup(*plugins, folder=folder, **more)
    with DistributedContext.join(Layout(), "cpu") as dist:
        if world is not None:
            dist.layout = world
        found = Job(made.config, made.hooks, Run(folder / "run"), dist, Control())
        made.hooks.bind(found)
        yield found


def write_config(folder: Path, *plugins: str, text: str = "", **values: Any) -> Path:
    """A TOML file of a toy run, for the command line; dotted plugins need `tests` in PYTHONPATH."""
    import tomlkit

    table: dict[str, Any] = {"plugins": [*TOYS, *plugins]}
    for key, value in {**SMALL, "train.steps": 4, **values}.items():
        section, _, name = key.partition(".")
        table.setdefault(section, {})[name] = value
    file = folder / "toy.toml"
    file.write_text(tomlkit.dumps(table) + text, encoding="utf-8")
    return file


class ToyRest(Plugin):
    """Fills every slot that a run must have beside model and data, so that it needs none of forge's own plugins."""

    api = (1, 0)

    @hookimpl
    def task(self, job: Any) -> Any:
        return ToyTask()

    @hookimpl
    def loss(self, job: Any) -> Any:
        raise AssertionError("the task does not ask")

    @hookimpl
    def executor(self, model: Model, task: Any, job: Any) -> TwoPartExecutor:
        return TwoPartExecutor(model, task)  # which also runs one part

    @hookimpl
    def optimizer(self, model: Model, job: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    @hookimpl
    def lr_schedule(self, optimizer: torch.optim.Optimizer, job: Any) -> Any:
        return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


class ToyTask:
    """Plain cross-entropy."""

    def weight(self, batch: Batch) -> int:
        return int((batch.labels != MASKED).sum())

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        logits = self.outputs(part, hidden, batch).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch.labels.flatten(), ignore_index=MASKED, reduction="sum")

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = part.get_submodule("head")(hidden)
        return logits

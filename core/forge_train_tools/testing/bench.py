"""A plugin at the work bench: a composed tiny job, and what the trials of its hooks are made with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from forge_train.compose.compose import compose
from forge_train.contract.batch import Batch
from forge_train.contract.model import Model
from forge_train.contract.protocols import Loader
from forge_train.contract.transform import Transform
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train.mesh.world import World
from forge_train.plugin.calls import EnabledPlugin
from forge_train.plugin.hookspecs import SPECS
from forge_train.plugin.job import Job
from forge_train.registry.setup import Setup
from forge_train.run.control import Control
from forge_train.run.run import Run
from forge_train_kit import hookspecs as kit
from forge_train_kit.layers import Layer

from .conformance import SkippedError, require

_T = TypeVar("_T")
TOKENS, LABELS = kit.head.gives, SPECS["task"].gives
"""Names of what heads and tasks give by default."""


class Bench:
    """The tiny `job` of a plugin under test. Whatever it gives is made anew, and is the same every time."""

    def __init__(self, setup: Setup, enabled: EnabledPlugin, folder: Path) -> None:
        self.setup, self.enabled = setup, enabled
        wanted = setup.config.run.device
        self.device = torch.device("cpu" if wanted == "auto" else wanted)
        self.job = self._job(folder, rank=0, ranks=1)
        setup.hooks.bind(self.job)

    def make(self, trial: Trial) -> str | None:
        """Make a trial from a known state of the random numbers."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return trial(self)

    def answer(self, hook: str, **arguments: Any) -> Any:
        """Return the plugin's own answer to a hook."""
        ((_, answer),) = self.job.hooks._calls.collect(hook, {"job": self.job, **arguments}, only=self.enabled.name)
        return answer

    def model(self) -> Model:
        """A model with its initial weights."""
        model = compose(self.job).model
        model.watch(self.job.step.passes)
        return model

    def batches(self, count: int) -> list[Batch]:
        """The first micro-batches of the training data, as the engine hands them on."""
        self.job.step.end()  # of the trial before
        loader, prepare = self.job.hooks.build_data("train"), self.job.hooks.prepare_batch()
        if (on_model := getattr(loader, "on_model", None)) is not None:
            with torch.no_grad():
                on_model(self.model())
        return prepare([next(loader) for _ in range(count)])

    def loader(self, split: Literal["train", "validation"], rank: int = 0, ranks: int = 1) -> Loader:
        """The data of one of several data-parallel ranks, which this process only pretends to be.

        Raises:
            SkippedError: for batches that are made with the model: ranks that are not there can't share theirs.
        """
        self.job.hooks.bind(self._job(self.job.run.dir.parent, rank, ranks))
        try:
            loader = self.job.hooks.build_data(split)
        finally:
            self.job.hooks.bind(self.job)
        if hasattr(loader, "on_model"):
            raise SkippedError("its batches are made with the model; compare runs of one and of two ranks instead")
        return loader

    @property
    def layer(self) -> Layer:
        """A layer as chains are asked to build."""
        from forge_train_kit.model import RoPE

        # The model's in tiny.toml, or as the check was told, for attention that has no groups.
        sections = self.setup.config.sections.values()
        kv_heads = next((one.kv_heads for one in sections if hasattr(one, "kv_heads")), 2) or 4
        return Layer(
            index=0, num_layers=2, dim=32, heads=4, kv_heads=kv_heads, head_dim=8, ffn_dim=48, rope=RoPE(8, length=64)
        )

    def transforms(self, layout: Layout) -> list[Transform]:
        """Return the transforms that the plugin would apply on the processes of a layout, without applying any."""
        context = _Pretended(layout, self.device, World(0, layout.world))
        job = Job(self.setup.config, self.setup.hooks, self.job.run, context, Control())
        ((_, answer),) = job.hooks._calls.collect("parallelize", {"job": job}, only=self.enabled.name)
        return [answer] if isinstance(answer, Transform) else list(answer or ())

    def job_on(self, device: torch.device, precision: Literal["fp32", "bf16"]) -> Job:
        """The same job on another device, in another precision."""
        config = replace(self.setup.config, train=replace(self.setup.config.train, precision=precision))
        context = _Pretended(Layout(dp_shard=1), device, World(0, 1))
        return Job(config, self.setup.hooks, self.job.run, context, Control())

    def _job(self, folder: Path, rank: int, ranks: int) -> Job:
        layout = Layout(dp_shard=ranks)
        context = _Pretended(layout, self.device, World(rank, ranks))
        return Job(self.setup.config, self.setup.hooks, Run(folder / "job"), context, Control())


class _Pretended(DistributedContext):
    """One rank of a world that is not there: collectives give back what they get."""

    @property
    def data_rank(self) -> int:
        return self.rank

    def barrier(self) -> None:
        return None

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum", axis: str = "") -> Tensor:
        return tensor

    def gather_objects(self, value: _T, axis: str = "") -> list[_T]:
        return [value] * self.world

    def on_main(self, function: Callable[[], _T]) -> _T:
        return function()


class OpaqueHead(nn.Module):
    """A head of hidden states alone, whose weights are out of reach, as a sharded one's are. Counts its calls."""

    def __init__(self, dim: int, vocabulary: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, vocabulary)
        self.calls = 0

    def forward(self, hidden: Tensor, *more: object, **options: object) -> Tensor:
        given = ", ".join([*("…" for _ in more), *(f"{name}=…" for name in options)])
        require(not given, f"it calls `head(hidden, {given})`; a head that gives {TOKENS} takes hidden states alone")
        self.calls += 1
        logits: Tensor = self.inner(hidden)
        return logits


@dataclass
class Oracle:
    """Reference for the gradients of a step: forward and backward through the parts, batch by batch."""

    model: Model
    task: Any

    def train(self, batches: list[Batch], scale: float) -> float:
        total = 0.0
        for batch in batches:
            loss = self.loss(batch)
            torch.autograd.backward(loss * scale)
            total += float(loss.detach())
        return total

    def loss(self, batch: Batch) -> Tensor:
        self.model.on_micro_batch(True, batch=batch)
        loss: Tensor = self.task.loss(self.model.parts[-1], hidden_states(self.model, batch), batch)
        return loss


def hidden_states(model: Model, batch: Batch) -> Tensor:
    """Return the output of the last part."""
    hidden = batch.inputs
    for part in model.parts:
        hidden = part(hidden, **batch.model_inputs())
    return hidden


def cut_at(batch: Batch, row: int) -> list[Batch]:
    """A batch's sequences before one, and from it on."""
    return [batch.slice("batch", span) for span in ((0, row), (row, len(batch.inputs)))]


def draw_gradients(model: Model, seed: int, *, every: int = 1) -> None:
    """Give the model's parameters (or only each `every`th) gradients at random, the others none."""
    generator = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(model.parameters()):
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = drawn if parameter.requires_grad and number % every == 0 else None


def same(a: Any, b: Any) -> bool:
    """Return True if two trees of tensors and plain values are equal, bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def close(a: Tensor, b: Tensor, what: str, tolerance: float = 1e-4) -> None:
    """Fail unless two tensors agree."""
    require(a.shape == b.shape, f"{what}: shape {tuple(a.shape)} instead of {tuple(b.shape)}")
    a, b = a.detach().double(), b.detach().double()
    worst = float((a - b).abs().max()) if a.numel() else 0.0
    limit = tolerance * max(1.0, float(b.abs().max()) if b.numel() else 0.0)
    require(worst <= limit, f"{what}: off by {worst:.2g}, {limit:.2g} is allowed")


def scalar(value: Any, what: str) -> Tensor:
    """Fail unless a value is a finite 0-dim tensor."""
    require(isinstance(value, Tensor), f"{what} must be a tensor, found {type(value).__name__}")
    require(value.dim() == 0, f"{what} must be a 0-dim tensor, found shape {tuple(value.shape)}")
    require(bool(torch.isfinite(value.detach())), f"{what} is {float(value.detach())}")
    return value  # type: ignore[no-any-return]


Trial = Callable[[Bench], str | None]
Trials = Mapping[str, Sequence[tuple[str, Trial]]]
"""Hook → its trials, each with what it finds out."""

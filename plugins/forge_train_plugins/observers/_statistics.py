"""Statistics of logged steps: norms of parameter groups, module outputs, attention logits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_train import ConfigError, Job, Metric, Model
from forge_train.base.errors import nearest
from forge_train.contract.protocols import SpanName
from forge_train.mesh.tensors import local
from forge_train_kit.layers import AttentionOptions
from forge_train_kit.metrics import Norm
from forge_train_kit.model import LargestLogit

DEPTH = 2
"""Words of a module's name that make a kind: `layers` and `attention`."""


class Activation(Metric):
    """Magnitudes of tensor elements."""

    per_rank = True  # elements that several ranks have count more often, and all of them alike

    def __init__(self) -> None:
        super().__init__(sums=3, maxima=1)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        if not x.numel():
            return
        square = torch.linalg.vector_norm(x, dtype=torch.float64).square()
        zeros = x.numel() - x.count_nonzero()
        self.sums += torch.stack([square, zeros.double(), torch.full_like(square, x.numel())])
        largest = torch.linalg.vector_norm(x, torch.inf).to(self.maxima)
        torch.maximum(self.maxima, largest, out=self.maxima)

    def value(self, sums: Tensor, maxima: Tensor) -> Mapping[str, float]:
        square, zeros, count = sums.tolist()
        return {"rms": (square / count) ** 0.5, "max": float(maxima[0]), "zeros": zeros / count}


class Logits(Metric):
    """The largest magnitude."""

    per_rank = True  # each rank may have heads of its own

    def __init__(self) -> None:
        super().__init__(maxima=1)

    def update(self, largest: Tensor) -> None:
        torch.maximum(self.maxima, largest.to(self.maxima), out=self.maxima)

    def value(self, sums: Tensor, maxima: Tensor) -> float:
        return float(maxima[0])


class Observer:
    """Observes a model at logged steps.

    Args:
        config: `[statistics]`.
        model: composed; every rank makes one.
        job: its run.

    Raises:
        ConfigError: for a pattern that matches nothing.
    """

    def __init__(self, config: Any, model: Model, job: Job) -> None:
        self._config, self._job = config, job
        self.step = 0
        """The last one that was done."""
        self._watching = False
        self._largest = LargestLogit()
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._groups: dict[str, list[Tensor]] = {}
        for group, name in self._grouped(list(trained)):
            self._groups.setdefault(group, [])
            if name in trained:
                self._groups[group].append(trained[name])
        modules = dict(model.named_modules())
        self._modules = dict(self._kinds("activations", config.activations, list(modules)))
        kernels = [name for name, one in modules.items() if callable(getattr(one, "kernel", None))]
        kernels = [name for names in job.dist.gather_stages(kernels) for name in names]
        if config.attention_logits and not kernels:
            raise ConfigError(
                "statistics.attention_logits: no module of this model shows its attention kernel.",
                key="statistics.attention_logits",
            )
        self._logits = {name: Logits() for name in kernels if config.attention_logits}
        self._norms = {(kind, group): Norm(job) for kind in config.norms for group in self._groups}
        self._activations = {kind: Activation() for kind in dict.fromkeys(self._modules.values())}

    @property
    def metrics(self) -> dict[str, Metric]:
        return {
            **{f"{kind}.{group}": one for (kind, group), one in self._norms.items()},
            **{f"activations.{kind}": one for kind, one in self._activations.items()},
            **{f"attention_logits.{name}": one for name, one in self._logits.items()},
        }

    def attach(self, model: Model) -> None:
        """Watch modules. Before the first step, so that torch.compile sees it."""
        for name, module in model.named_modules():
            if name in self._modules:
                module.register_forward_hook(partial(self._on_output, self._activations[self._modules[name]]))
            if name in self._logits:
                watched: Any = module
                watched.kernel = _WatchedKernel(watched.kernel, partial(self._on_kernel, self._logits[name]))

    # -- during a step ----------------------------------------------------------------------------

    @property
    def _logged(self) -> bool:
        """Return True if the current step is logged."""
        return self._job.logs(self.step + 1)

    def around(self, span: SpanName) -> AbstractContextManager[None]:
        """A span of the step in which something is observed."""
        return self._updating() if span == "optimizer" else self._watches()

    @contextmanager
    def _watches(self) -> Iterator[None]:
        self._watching = self._logged
        try:
            yield
        finally:
            self._watching = False

    def gradients(self) -> None:
        """Before clipping."""
        if self._logged:
            self._observe("gradients", lambda one: one.grad)

    @contextmanager
    def _updating(self) -> Iterator[None]:
        if not (self._logged and "updates" in self._config.norms):
            yield
            return
        every = {id(one): one for group in self._groups.values() for one in group}
        before = {key: one.detach().clone() for key, one in every.items()}
        yield
        for key, one in every.items():
            before[key] = one.detach() - before[key]
        self._observe("updates", lambda one: before[id(one)])

    def end(self, step: int) -> None:
        if self._logged:
            self._observe("parameters", lambda one: one.detach())
        self.step = step

    def _observe(self, kind: str, of: Any) -> None:
        if kind in self._config.norms:
            for group, parameters in self._groups.items():
                found = (of(one) for one in parameters)
                self._norms[kind, group].update(one for one in found if one is not None)

    def _on_output(self, metric: Activation, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._watching:
            _observe_output(metric, output)

    def _on_kernel(self, metric: Logits, query: Tensor, key: Tensor, options: AttentionOptions) -> None:
        if self._watching:
            self._observe_logits(metric, query, key, options)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _observe_logits(self, metric: Logits, query: Tensor, key: Tensor, options: AttentionOptions) -> None:
        if not _recomputes():
            metric.update(self._largest(query, key, options))

    # -- names ------------------------------------------------------------------------------------

    def _grouped(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Every group with the parameters in it, those of other stages among them."""
        if not self._config.groups:
            for name in self._everywhere(names):
                yield self._kind(name.rpartition(".")[0]) or name, name
            return
        named: dict[str, str] = {}
        for pattern, name in self._matched("groups", self._config.groups, names):
            group = _plain(pattern)
            if named.setdefault(group, pattern) != pattern:
                raise ConfigError(
                    f"statistics.groups: {named[group]!r} and {pattern!r} would both be logged as {group!r}.",
                    key="statistics.groups",
                )
            yield group, name

    def _kinds(self, key: str, patterns: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Every module that matches, with its kind."""
        for _, name in self._matched(key, patterns, [name for name in names if name]):
            yield name, self._kind(name, depth=len(name)) or name

    def _matched(self, key: str, patterns: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Every pattern with each name that it matches."""
        everybody = self._everywhere(names)
        for pattern in patterns:
            found = [name for name in everybody if fnmatchcase(name, pattern)]
            if not found:
                full = f"statistics.{key}"
                raise ConfigError(f"{full}: {pattern!r} matches nothing.{nearest(pattern, everybody)}", key=full)
            yield from ((pattern, name) for name in found)

    def _everywhere(self, names: Sequence[str]) -> list[str]:
        """Names on all stages of a pipeline."""
        return list(dict.fromkeys(name for some in self._job.dist.gather_stages(list(names)) for name in some))

    def _kind(self, name: str, depth: int = DEPTH) -> str:
        """The first words of a name, with numbers only where layers are told apart."""
        words: list[str] = []
        for word in name.split("."):
            if not word.isdigit():
                if not depth:
                    break
                depth -= 1
            elif not self._config.layers:
                continue
            words.append(word)
        return ".".join(words)


class _WatchedKernel:
    """A kernel whose queries and keys are looked at."""

    def __init__(self, kernel: Any, look: Any) -> None:
        self._kernel, self._look = kernel, look

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Any:
        self._look(query, key, options)
        return self._kernel(query, key, value, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _observe_output(metric: Activation, output: Any) -> None:
    first = output[0] if isinstance(output, tuple) and output else output
    if isinstance(first, Tensor) and first.is_floating_point() and not _recomputes():
        metric.update(local(first.detach()))


def _recomputes() -> bool:
    """Return True during a backward pass, in which activation checkpointing calls modules a second time."""
    return torch._C._current_graph_task_id() != -1


def _plain(pattern: str) -> str:
    """A pattern as a name that every tracker takes."""
    return re.sub(r"\.{2,}", ".", re.sub(r"[^\w./-]", "", pattern)).strip(".")

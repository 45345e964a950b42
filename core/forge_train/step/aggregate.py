"""The metrics of a run: added up over ranks, all in one message, when they are logged; saved and put back. With them,
throughput and memory make the lines of metrics.jsonl."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..base.errors import PluginError
from ..base.format import place
from ..checkpoint.state import rows
from ..contract.events import Bins, Metric, StepResult, Value, plain
from ..plugin.inspection import ReturnCheck
from ..plugin.job import Job

KINDS: tuple[tuple[str, Literal["sum", "max"]], ...] = (("sums", "sum"), ("maxima", "max"))


class Metrics:
    """Some metrics by name, on the job's device.

    Each data-parallel rank observes its own batches. Replicas (under tensor parallelism, say) observe the same, and are
    counted once: states are added up over the axis `loss`, as losses are; those of `Metric.per_rank` over all ranks.
    """

    def __init__(self, job: Job, metrics: Mapping[str, Metric]) -> None:
        self._job, self._metrics = job, dict(sorted(metrics.items()))
        self._kind = job.hooks.inspection.of(float | Mapping[str, float] | Bins)
        for name, metric in self._metrics.items():
            _check(name, metric)
        self._fresh = {name: (one.sums.clone(), one.maxima.clone()) for name, one in self._metrics.items()}
        if metrics and job.dist.world > 1:
            shapes = {f"metric {name}": [tuple(one.shape) for one in two] for name, two in self._fresh.items()}
            job.dist.agree(shapes)
        self.reset()

    @property
    def timings(self) -> set[str]:
        """Names of those that differ from run to run."""
        return {name for name, metric in self._metrics.items() if metric.timing}

    def reset(self) -> None:
        """Forget what was observed."""
        for name, metric in self._metrics.items():
            metric.sums, metric.maxima = (one.to(self._job.device, copy=True) for one in self._fresh[name])

    def take(self) -> dict[str, Value]:
        """Return what all ranks observed since the last call, for metrics that observed anything; waits for the device.

        Sends at most two messages, however many metrics there are, and two more for per-rank metrics.
        """
        own = {name: one for name, one in self._metrics.items() if one.per_rank}
        others = {name: one for name, one in self._metrics.items() if not one.per_rank}
        whole = {which: self._reduced(which, op, others) | self._reduced(which, op, own) for which, op in KINDS}
        self.reset()
        found: dict[str, Value] = {}
        for name, metric in self._metrics.items():
            state = whole["sums"][name], whole["maxima"][name]
            if not all(map(torch.equal, state, self._fresh[name])):
                found[name] = _value(name, metric, self._kind, *state)
        return found

    def _reduced(self, which: str, op: Literal["sum", "max"], metrics: Mapping[str, Metric]) -> dict[str, Tensor]:
        """One of the two states of some metrics, of all ranks together, on the CPU."""
        held = {name: getattr(metric, which) for name, metric in metrics.items()}
        if bad := [name for name, one in held.items() if one.requires_grad]:
            raise PluginError(f"The metric {bad[0]!r} keeps a graph: detach what `update` is given.")
        if not any(one.numel() for one in held.values()):
            return {name: one.cpu() for name, one in held.items()}
        flat = torch.cat([one.reshape(-1) for one in held.values()])
        axis = "" if next(iter(metrics.values())).per_rank else "loss"
        parts = torch.split(self._job.dist.all_reduce(flat, op, axis=axis).cpu(), [o.numel() for o in held.values()])
        return {name: part.view(one.shape) for (name, one), part in zip(held.items(), parts, strict=True)}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Observe something else, such as an evaluation, and then go on where it was."""
        kept = {name: (metric.sums, metric.maxima) for name, metric in self._metrics.items()}
        self.reset()
        try:
            yield
        finally:
            for name, state in kept.items():
                self._metrics[name].sums, self._metrics[name].maxima = state

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Return what each rank has observed since the last logged step, one row per rank."""
        if not self._metrics:
            return None
        row = torch.cat([one.reshape(-1) for metric in self._metrics.values() for one in (metric.sums, metric.maxima)])
        sizes = {name: [metric.sums.numel(), metric.maxima.numel()] for name, metric in self._metrics.items()}
        return {"rows": rows(row[None], self._job.dist), "sizes": sizes, "once": self._once()}

    def _once(self) -> list[int]:
        """The ranks whose observations make up the whole, without replicas."""
        return self._job.dist.ranks_along("loss")

    def like(self, saved: Mapping[str, Any] | None, shapes: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return buffers to load the rows into: this rank's own on the same layout, all of them on another."""
        if saved is None:
            return {}
        ranks, (shape, _) = self._job.dist, shapes["metrics.rows"]
        if shape[0] != ranks.world or saved["once"] != ranks.on_main(self._once):
            return {"metrics.rows": torch.empty(shape, dtype=torch.float64)}
        return {"metrics.rows": rows(torch.empty(1, shape[1], dtype=torch.float64), ranks)}

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from what was observed. On another layout the first rank of each group gets it all, and rank 0 what
        each rank had of its own: the sum over ranks is the same."""
        self.reset()
        if saved is None:
            return
        own = hasattr(saved["rows"], "to_local") or self._job.dist.world == 1 == len(saved["rows"])
        held = getattr(saved["rows"], "to_local", lambda: saved["rows"])().cpu()
        once = held if own else held[saved["once"]]
        at = 0
        for name, (sums, maxima) in saved["sizes"].items():
            per_rank = name in self._metrics and self._metrics[name].per_rank
            rows, first = (held, 0) if per_rank else (once, self._once()[0])
            state = rows[:, at : at + sums].sum(0), rows[:, at + sums : at + sums + maxima].amax(0)
            at += sums + maxima
            metric = self._metrics.get(name)
            if metric is None or [metric.sums.numel(), metric.maxima.numel()] != [sums, maxima]:
                continue  # of an observer that is no longer there, or set otherwise
            if own or self._job.dist.rank == first:
                metric.sums.copy_(state[0].view(metric.sums.shape))
                metric.maxima.copy_(state[1].view(metric.maxima.shape))


def _value(name: str, metric: Metric, kind: ReturnCheck, *state: Tensor) -> Value:
    """A metric's result, which its author may have got wrong."""
    try:
        value: Value = metric.value(*state)
    except Exception as error:  # a stranger's code
        told = f"{type(error).__name__}: {error}"
        raise PluginError(f"The metric {name!r}: value ({place(metric.value)}) failed: {told}") from error
    if text := kind.problem(value):
        raise PluginError(f"The metric {name!r}: value ({place(metric.value)}) must return {kind.words}, {text}.")
    return value


def split(found: Mapping[str, Value]) -> tuple[dict[str, float], dict[str, Bins]]:
    """Results as one number for each name, and the histograms among them."""
    numbers: dict[str, float] = {}
    histograms: dict[str, Bins] = {}
    for name, value in found.items():
        if isinstance(value, Bins):
            histograms[name] = value
        elif isinstance(value, Mapping):
            numbers |= {f"{name}.{key}": float(one) for key, one in value.items()}
        else:
            numbers[name] = float(value)
    return numbers, histograms


def _check(name: str, metric: Metric) -> None:
    if name.endswith(".") or name != "".join(name.split()):
        raise PluginError(f"The metric {name!r}: a name is not empty, and has no spaces.")
    for which in ("sums", "maxima"):
        state = getattr(metric, which, None)
        if not isinstance(state, Tensor) or state.dtype != torch.float64:
            raise PluginError(f"The metric {name!r}: `{which}` must be a float64 tensor; call super().__init__ first.")


# -- lines of metrics.jsonl ------------------------------------------------------------------------------------------


class Meter:
    """Measures between two logged steps; evaluations and checkpoints are left out."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._since = 0.0
        self._tokens = 0
        self._step = 0
        self._waited = 0.0

    def start(self, tokens: int, step: int) -> None:
        """Begin a measurement where the run is."""
        self._since, self._tokens, self._step = time.perf_counter(), tokens, step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began

    def line(self, result: StepResult, waited: float = 0.0) -> dict[str, Any]:
        """A line of metrics.jsonl for a step; waits for the device. `waited` is the time in the loader so far."""
        loss, norm = float(result.loss), float(result.grad_norm)
        seconds = max(time.perf_counter() - self._since, 1e-9)
        tokens, steps = result.tokens - self._tokens, max(result.step - self._step, 1)
        self.start(result.tokens, result.step)
        line: dict[str, Any] = {
            "step": result.step,
            "tokens": result.tokens,
            "loss": loss,
            "grad_norm": norm,
            "lr": result.lr,
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds / steps,
            "memory_gib": memory_gib(self._job.device),
            "data_wait": min((waited - self._waited) / seconds, 1.0),
        }
        self._waited = waited
        for key, value in result.metrics.items():
            line[key] = None if value is None else plain(value)
        if result.timings:
            line["timing"] = sorted(result.timings)
        return line


def memory_gib(device: torch.device) -> float:
    """Peak memory: of the device's tensors on CUDA, of the whole process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if (status := Path("/proc/self/status")).exists() and "VmHWM:" in (text := status.read_text()):
        # `ru_maxrss` would begin with the memory of what started this process: a notebook, say.
        return int(text.split("VmHWM:")[1].split()[0]) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30

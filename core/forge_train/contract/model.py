"""The composed model, one or more local parts behind one set of global names; and how weights begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..base.errors import ConfigError
from .batch import Direction, MicroBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ..config.sections import Precision as PrecisionName
    from .batch import Batch
    from .transform import Applied


@dataclass(frozen=True, slots=True)
class Init:
    """Initial values of a parameter.

    Args:
        kind: `normal` (mean 0), `uniform` (mean 0), `ones`, `zeros`, or `given`.
        std: standard deviation of the first two kinds.
        values: for `given`: maps the run's seed to the full tensor on the CPU, the same on every rank.
    """

    kind: Literal["normal", "uniform", "ones", "zeros", "given"]
    std: float = 0.02
    values: Callable[[int], Tensor] | None = None


class Model:
    """The model, as passed to `optimizer`, `executor` and `on_start`.

    A pipeline gives a rank several parts, each with gaps where other stages were cut out, so names are global: layer 17
    is `layers.17` on any rank.
    """

    def __init__(self, parts: Sequence[nn.Module], applied: Sequence[tuple[int | None, Applied]] = ()) -> None:
        """
        Args:
            parts: those of this rank.
            applied: index of a part, None for all of them, and what was done to it.
        """
        self.parts = tuple(parts)
        self._trained: dict[str, Model] = {}
        self._frozen: list[Model] = []
        self._switches = [(part, a.on_micro_batch) for part, a in applied if a.on_micro_batch]
        self._finishers = [a.after_backward for _, a in reversed(applied) if a.after_backward]
        self._free_gathered = [a.free_gathered for _, a in applied if a.free_gathered]
        self._copies = frozenset(name for _, a in applied for name in a.copies)
        self._cut = any(isinstance(a.model, list) for _, a in applied)

    def join(self, name: str, other: Model, *, trained: bool) -> None:
        """Have an extra model take part in the run's steps; a trained one's parameters are named `name.…`."""
        if trained:
            self._trained[name] = other
        else:
            self._frozen.append(other)
            other.train(False)

    def alone(self) -> Model:
        """The same without extra models, to be looked at."""
        alone = Model(self.parts)
        alone._copies, alone._cut = self._copies, self._cut
        return alone

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, a tied one under its first name; copies of what another part has are left out."""
        seen: set[int] = set()
        for part in self.parts:
            for name, parameter in part.named_parameters():
                if id(parameter) not in seen and name not in self._copies:
                    seen.add(id(parameter))
                    yield name, parameter
        for prefix, other in self._trained.items():
            yield from ((f"{prefix}.{name}", parameter) for name, parameter in other.named_parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        for _, parameter in self.named_parameters():
            yield parameter

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module with its global name; the parts themselves have the empty one."""
        for part in self.parts:
            yield from part.named_modules()
        for prefix, other in self._trained.items():
            yield from ((f"{prefix}.{name}".rstrip("."), module) for name, module in other.named_modules())

    @property
    def roles(self) -> dict[str, str]:
        """Parameter name → `head`, `embedding`, … as the model declares it."""
        found: dict[str, str] = {}
        for part in self.parts:
            found |= {name: role for name, role in getattr(part, "roles", {}).items() if name not in self._copies}
        for prefix, other in self._trained.items():
            found |= {f"{prefix}.{name}": role for name, role in other.roles.items()}
        return found

    @property
    def looks_ahead(self) -> str:
        """Why this model can't generate text, with the first module that says so; empty if it can."""
        reasons = ((getattr(module, "looks_ahead", ""), name) for name, module in self.named_modules())
        return next((f"{reason} (module {name!r})" for reason, name in reasons if reason), "")

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers, without gradients, by global name; a tied parameter once."""
        state = {name: parameter.detach() for name, parameter in self.named_parameters()}
        for prefix, module in self.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    state[f"{prefix}.{name}" if prefix else name] = buffer
        return state

    def flops_per_token(self, sequence: int) -> float | None:
        """Forward and backward FLOPs per token of this rank's parts, as they declare them (causal attention, without
        the input embedding); None where one does not."""
        declared = [getattr(part, "flops_per_token", None) for part in self.parts]
        return sum(float(count(sequence)) for count in declared if count) if all(declared) else None

    def train(self, mode: bool = True) -> None:
        for part in self.parts:
            part.train(mode)
        for other in self._trained.values():
            other.train(mode)

    def watch(self, tell: Callable[[MicroBatch], None]) -> None:
        """Tell of each micro-batch, before the transforms are told."""
        self._switches.insert(0, (None, tell))

    def on_micro_batch(
        self, last: bool, part: int = 0, direction: Direction = "both", batch: Batch | None = None
    ) -> None:
        """Tell a part's transforms that a micro-batch begins; an executor calls it before each (see `MicroBatch`)."""
        micro = MicroBatch(last, part, direction, batch)
        for whose, switch in self._switches:
            if whose in (None, part):
                switch(micro)
        for other in self._trained.values():
            other.on_micro_batch(last, part, direction, batch)

    def after_backward(self) -> None:
        """Have the transforms finish the step's gradients."""
        for finish in self._finishers:
            finish()
        for other in self._trained.values():
            other.after_backward()
        for other in self._frozen:
            other.free_gathered()

    def free_gathered(self) -> None:
        """Have the transforms drop gathered copies of weights, after a forward without backward."""
        for free in self._free_gathered:
            free()
        for other in (*self._trained.values(), *self._frozen):
            other.free_gathered()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of a model in one part.

        Raises:
            ConfigError: for a model that a pipeline has cut.
        """
        if self._cut:
            raise ConfigError(
                "A pipeline has cut the model into parts, which its executor runs in turn: nothing else "
                "can call it as a whole."
            )
        (part,) = self.parts
        return part(*args, **kwargs)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run. A transform that covers `precision` makes them real."""

    param: torch.dtype
    """Of the weights while they compute."""
    compute: torch.dtype
    """Of activations."""
    reduce: torch.dtype
    """Of gradients while they are reduced over ranks."""
    master: torch.dtype
    """Of the weights the optimizer updates, and its state."""

    @classmethod
    def of(cls, name: PrecisionName) -> Precision:
        import torch

        narrow = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        return cls(param=narrow, compute=narrow, reduce=torch.float32, master=torch.float32)

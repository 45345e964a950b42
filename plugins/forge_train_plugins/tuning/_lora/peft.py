"""The updates as PEFT stores them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from forge_train import ConfigError
from forge_train_kit.hf import HFAdapter
from forge_train_kit.hf.start import exported
from forge_train_kit.state_map import Box, StateMap, Step, View

from .folder import PREFIX
from .merge import Rounded, magnitude
from .sizes import Sizes, divisor
from .stacks import Fused, ends_of_experts, fused, nested
from .targets import FULL, MAGNITUDE

if TYPE_CHECKING:
    from torch import Tensor

    from forge_train import Job

ENDS = (".lora_A", ".lora_embedding_A", "_lora_A")


@dataclass(frozen=True)
class Stacks:
    """The updates of stacks that lie in one parameter, as one update: `A` side by side, `B` in blocks.

    Args:
        fused: the parameter.
        key: the module that has its factors.
        ranks: of each stack's update; 0 for a stack without one.
        scales: of each stack's update, over the scale of the whole.
    """

    fused: Fused
    key: str
    ranks: tuple[int, ...]
    scales: tuple[float, ...]

    @property
    def rank(self) -> int:
        return sum(self.ranks)

    @property
    def updated(self) -> list[str]:
        return [name for name, rank in zip(self.fused.pieces, self.ranks, strict=True) if rank]

    def a(self, parts: list[Tensor]) -> Tensor:
        """`[experts · rank, in]`."""
        import torch

        return torch.cat(parts, 1).flatten(0, 1)

    def b(self, parts: list[Tensor]) -> Tensor:
        """`[out, rank · experts]`, of which the experts are inner."""
        whole = parts[0].new_zeros(self.fused.experts, sum(self.fused.rows), self.rank)
        row = column = 0
        left = iter(parts)
        for rows, rank, scale in zip(self.fused.rows, self.ranks, self.scales, strict=True):
            if rank:
                whole[:, row : row + rows, column : column + rank] = next(left) * scale
            row, column = row + rows, column + rank
        return whole.permute(1, 2, 0).flatten(1, 2)


@dataclass(frozen=True, eq=False)
class Made(View):
    """A tensor made of other whole ones."""

    inputs: tuple[View, ...]
    function: Callable[[list[Tensor]], Tensor]

    @classmethod
    def of(cls, inputs: Sequence[View], function: Callable[[list[Tensor]], Tensor]) -> Made:
        import torch

        made = function([torch.empty(one.shape, dtype=one.dtype, device="meta") for one in inputs])
        return cls(tuple(made.shape), made.dtype, tuple(inputs), function)

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        return [(one, tuple((0, size) for size in one.shape)) for one in self.inputs]

    def make(self, box: Box, parts: list[Tensor]) -> Tensor:
        return self.function(parts)[tuple(slice(*one) for one in box)]


@dataclass(frozen=True)
class Factors(StateMap):
    """Gives both factors of each update under PEFT's names.

    Args:
        config: the section.
        sizes: of the updates.
        modules: linear or embedding → its name in Hugging Face layout.
        stacks: those that lie in one parameter, together.
        tuned: parameters that are trained in full.
    """

    config: Any
    sizes: Sizes
    modules: Mapping[str, str]
    stacks: Sequence[Stacks] = ()
    tuned: Sequence[str] = ()

    def apply(self, step: Step) -> None:
        placed = {name for one in self.stacks for name in one.updated}
        for first in [one for one in step.tensors if one.endswith(ENDS)]:
            end = next(end for end in ENDS if first.endswith(end))
            name = first.removesuffix(end)
            if name not in self.modules and name not in placed:
                step.wrong.append(
                    f"{name}: its weight has no tensor of its own in Hugging Face layout; export the merged model"
                )
            if name in placed or name not in self.modules:
                continue
            last = "" if "embedding" in end else ".weight"
            for factor in (end, f"{end[:-1]}B"):
                for view in self._whole(step, name, f"{name}{factor}"):
                    step.give(f"{PREFIX}{self.modules[name]}{factor}{last}", view)
            if self.config.dora:
                for lengths in step.take(f"{name}.{MAGNITUDE}"):
                    if not self.config.adapter:
                        weight = Rounded.of(step.tensors[f"{name}.weight"], self.config)
                        lengths = Made.of([weight, lengths], magnitude)
                    step.give(f"{PREFIX}{self.modules[name]}.lora_magnitude_vector", lengths)
        for one in self.stacks:
            for factor, function in (("A", one.a), ("B", one.b)):
                if parts := [view for name in one.updated for view in self._whole(step, name, f"{name}_lora_{factor}")]:
                    step.give(f"{PREFIX}{one.key}.lora_{factor}.weight", Made.of(parts, function))

        for name in self.tuned:
            module, _, last = name.rpartition(".")
            if module not in self.modules:
                step.wrong.append(f"{name}: has no tensor of its own in Hugging Face layout; export the merged model")
                continue
            for view in step.take(name):
                step.give(f"{PREFIX}{self.modules[module]}.{last.removeprefix(FULL)}", view)

    def _whole(self, step: Step, name: str, factor: str) -> list[View]:
        """A factor of a weight's own update, with those of its fixed ones at its side."""
        fixed, own = self.sizes.fixed.get(name, ()), self.sizes.of(name)[1]
        found = step.take(factor, *(f"{factor}_{one.kind}" for one in fixed))
        if not fixed or not found:
            return found
        scales = [1.0, *(one.scale / own for one in fixed)] if factor.endswith("B") else [1.0] * len(found)
        return [Made.of(found, partial(_beside, scales, -1 if factor.endswith("B") else -2))]

    def inverse(self) -> NoReturn:
        raise ConfigError("lora: the factors of a folder are not renamed back.")


def adapter(
    config: Any,
    given: Sizes,
    job: Job,
    adapted: Sequence[str],
    stored: Mapping[str, View],
    modules: Mapping[str, str],
    tuned: Sequence[str] = (),
) -> HFAdapter:
    """The adapter of these weights; those without a place are named when the map is applied.

    Args:
        config: the section.
        given: rank and alpha of each update.
        job: the run's.
        adapted: linears, embeddings and stacks with an update.
        stored: the model's parameters, without updates.
        modules: module → its name in Hugging Face layout.
        tuned: parameters that are trained in full.
    """
    named = {name: modules[name] for name in adapted if name in modules}
    sizes = {theirs: given.together(name) for name, theirs in named.items()}
    layout = exported(job)
    taken = ends_of_experts(layout, stored) if layout is not None else set()
    if clash := next((theirs for theirs in named.values() if theirs.rpartition(".")[2] in taken), ""):
        raise ConfigError(
            f"lora: peft takes {clash.rpartition('.')[2]!r} for a linear of single experts, and would lose the update "
            f"of {clash!r} without a sound. Export the merged model, or leave such linears out of lora.modules."
        )
    known = fused(job, layout, stored) if layout is not None and {*adapted} - named.keys() else {}
    stacks = []
    for theirs, key in nested(known, [name for name, one in known.items() if {*one.pieces} & {*adapted}]).items():
        pieces = [
            (given.together(name)[0], given.of(name)[1]) if name in adapted else (0, 0.0)
            for name in known[theirs].pieces
        ]
        rank, first = sum(rank for rank, _ in pieces), next(scale for rank, scale in pieces if rank)
        ranks, scales = zip(*((rank, scale / first) for rank, scale in pieces), strict=True)
        stacks.append(Stacks(known[theirs], key, ranks, scales))
        alpha = first * divisor(rank, config.rslora)
        sizes[theirs] = (rank, alpha)
    usual = (config.rank, config.alpha)
    if sizes and usual not in sizes.values():
        usual = Counter(sizes.values()).most_common(1)[0][0]
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": usual[0],
        "lora_alpha": usual[1],
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": _targets(set(named.values()), set(modules.values())),
        # Their keys are patterns.
        "rank_pattern": {re.escape(name): rank for name, (rank, _) in sizes.items() if rank != usual[0]},
        "alpha_pattern": {re.escape(name): alpha for name, (_, alpha) in sizes.items() if alpha != usual[1]},
    }
    if whole := sorted({modules[one] for one in (name.rpartition(".")[0] for name in tuned) if one in modules}):
        described["modules_to_save"] = whole
    if stacks:
        described["target_parameters"] = [one.fused.name for one in stacks]
    return HFAdapter(Factors(config, given, modules, stacks, tuned), described)


def _beside(scales: Sequence[float], axis: int, parts: list[Tensor]) -> Tensor:
    import torch

    return torch.cat([one * scale for one, scale in zip(parts, scales, strict=True)], axis)


def _targets(adapted: set[str], known: set[str]) -> list[str]:
    """The last parts of the names, if these name no other module; else the whole names."""
    ends = {name.rpartition(".")[2] for name in adapted}
    others = {name.rpartition(".")[2] for name in known - adapted}
    return sorted(adapted if ends & others else ends)

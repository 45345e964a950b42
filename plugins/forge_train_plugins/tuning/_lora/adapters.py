"""The transform: which linears get which update."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from forge_train import Applied, ConfigError
from forge_train.base.errors import nearest
from forge_train.base.format import format_list
from forge_train_kit.hf.start import exported, same_modules
from forge_train_kit.model import Dropout
from forge_train_kit.state_map.views import Stored

from .folder import Folder
from .layers import LowRank, adapt
from .sizes import size

if TYPE_CHECKING:
    from forge_train import Job, Model

    from ..lora import LoRA


class Adapters:
    """The updates of one run."""

    def __init__(self, config: LoRA.Config, job: Job) -> None:
        self.config, self.job = config, job
        self.folder = Folder(config.adapter) if config.adapter else None
        self._linears: list[str] = []
        self._placed: set[str] = set()
        self._unchecked: dict[str, nn.Parameter | None] = {}
        self.adapted: list[str] = []
        """Names of the linears on this rank that have an update."""

    def apply(self, part: nn.Module) -> Applied:
        """Freeze a part, and add updates to those of its linears that the section names.

        Raises:
            ConfigError: for a pattern that matches nothing, and for a rank above a dimension.
        """
        part.requires_grad_(False)
        found = linears(part)
        given = self._given(part)
        taken = [name for name in found if (name in given if self.folder else self._takes(name, part))]
        self._placed |= {given[name] for name in taken if name in given}
        self._linears += found
        self.adapted += taken
        if self.job.dist.layout.pp == 1:
            self._expect_matches(self._linears, self.adapted)
            self._expect_places(self._placed)
        for name in taken:
            self._adapt(name, found[name], given.get(name, ""))
        added = tuple(f"{name}.{factor}" for name in taken for factor in ("lora_A", "lora_B"))
        ranks = sorted({size(self.config, name)[0] for name in taken})
        return Applied(part, tuple(taken), f"{len(taken)} linears of rank {' and '.join(map(str, ranks))}", added=added)

    def begin(self, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """The run begins: patterns are judged over all stages of a pipeline, and the optimizer's groups are looked at.

        Raises:
            ConfigError: for a pattern that matches nothing, and for an optimizer without learning rates by parameter.
        """
        if self.job.dist.layout.pp > 1:
            names = self.job.dist.gather_objects((self._linears, self.adapted, self._placed))
            found, adapted, placed = (itertools.chain(*one) for one in zip(*names, strict=True))
            self._expect_matches(found, adapted)
            self._expect_places(placed)
        rates = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
        modules = [one for one in model.named_modules() if isinstance(one[1], LowRank)]
        for name, module in modules:
            first, second = (rates.get(id(module._parameters[factor])) for factor in ("lora_A", "lora_B"))
            if first and second and not math.isclose(second, first * self.config.lr_ratio, rel_tol=1e-6):
                raise ConfigError(
                    f"lora.lr_ratio: lora_B of {name!r} learns at {second:g}, and its lora_A at {first:g}: the "
                    "optimizer does not read `lr_factors`, or its groups change one of the two.",
                    key="lora.lr_ratio",
                )

        self._unchecked = {name: module._parameters["lora_B"] for name, module in modules}

    def check_used(self) -> None:
        """After the first backward pass.

        Raises:
            ConfigError: for an update without a gradient beside others that have one: the model reads that linear's
                weight past its forward.
        """
        unused = [name for name, factor in self._unchecked.items() if factor is not None and factor.grad is None]
        if 0 < len(unused) < len(self._unchecked):  # all: the optimizer has taken them already
            raise ConfigError(
                f"lora.modules: the model computes {format_list(unused, 4)} without calling the linear, so its update "
                "has no effect. Name patterns that leave it out.",
                key="lora.modules",
            )
        self._unchecked = {}

    def _takes(self, name: str, part: nn.Module) -> bool:
        if self.config.modules:
            return any(fnmatchcase(name, pattern) for pattern in self.config.modules)
        return name.startswith(tuple(f"{unit}." for unit in getattr(part, "units", ())))

    def _expect_matches(self, linears: Iterable[str], adapted: Iterable[str]) -> None:
        given: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
            "lora.modules": (self.config.modules, [*linears]),
            "lora.groups": ([group.match for group in self.config.groups], [*adapted]),
        }
        for key, (patterns, names) in given.items():
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    ends = sorted({f"*.{name.rpartition('.')[2]}" for name in names})
                    hint = nearest(pattern, [*ends, *names]) or f" There are {format_list(ends)}."
                    raise ConfigError(f"{key}: {pattern!r} matches no linear.{hint}", key=key)

    def _given(self, part: nn.Module) -> dict[str, str]:
        """Linear → the name that `lora.adapter` has for it."""
        if self.folder is None:
            return {}
        layout = exported(self.job)
        if layout is None:
            raise ConfigError("lora.adapter: no plugin knows the Hugging Face names of this model (export_hf).")
        stored = {name: Stored(tuple(one.shape), one.dtype, name) for name, one in part.named_parameters()}
        known = set(self.folder.modules)
        return {own: theirs for own, theirs in same_modules(layout, stored).items() if theirs in known}

    def _expect_places(self, placed: Iterable[str]) -> None:
        if self.folder is not None and (lost := sorted({*self.folder.modules} - {*placed})):
            raise ConfigError(
                f"lora.adapter: {self.folder.path} updates {format_list(lost)}, which this model has no linear for.",
                key="lora.adapter",
            )

    def _adapt(self, name: str, module: nn.Linear, theirs: str) -> None:
        rank, scale = size(self.config, name)
        rows, columns = module.weight.shape
        if rank > min(rows, columns):
            raise ConfigError(
                f"lora.rank: {rank} is above a dimension of {name!r} ({columns} → {rows}). Set a lower rank, or one "
                "for this linear in lora.groups.",
                key="lora.rank",
            )
        dropout = Dropout(self.config.dropout, self.job, f"{name}.lora") if self.config.dropout else None
        adapt(module, rank, scale, dropout, self.config.lr_ratio)
        if self.folder is not None:
            if (held := len(self.folder.read(theirs, "lora_A"))) != rank:
                raise ConfigError(
                    f"lora.rank: {self.folder.path} holds {held} rows for {name!r}, and the run has {rank}.",
                    key="lora.rank",
                )
            module.lora_read = partial(self.folder.read, theirs)  # type: ignore[assignment]


def linears(part: nn.Module) -> dict[str, nn.Linear]:
    """The linears of a part by name, without those whose weight torch's own attention reads past their forward."""
    hidden = {
        f"{path}.{name}"
        for path, module in part.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        for name, _ in module.named_modules()
    }
    return {
        name: module for name, module in part.named_modules() if isinstance(module, nn.Linear) and name not in hidden
    }

"""The transform: which weights get which update."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn

from forge_train import Applied, ConfigError, MicroBatch
from forge_train.base.format import format_list
from forge_train.mesh.tensors import local
from forge_train_kit.model import Dropout
from forge_train_kit.state_map.views import Stored

from .base import encode
from .expected import expect_matches, expect_places, expect_untied
from .fixed import START, Fixed, begin, beneath
from .folder import Folder
from .full import Full, in_full, train_copies
from .layers import Adapted, LowRank, LowRankStacks, adapt
from .new_tokens import warn_of_new_tokens
from .sizes import Sizes, format_of
from .sources import Source, sources
from .targets import MAGNITUDE, Target, targets

if TYPE_CHECKING:
    from forge_train import Job, Model

    from ..lora import LoRA


class Adapters:
    """The updates of one run."""

    def __init__(self, config: LoRA.Config, job: Job) -> None:
        self.config, self.job = config, job
        self.folder = Folder(config.adapter) if config.adapter else None
        self.beneath = [Folder(path, "lora.beneath") for path in config.beneath]
        self.folders = [*filter(None, [self.folder]), *self.beneath]
        self.sizes = Sizes(config)
        self._found: list[str] = []
        self._placed: dict[str, set[str]] = {}
        self._begin: list[Target] = []
        self._unchecked: dict[str, nn.Parameter | None] = {}
        self._summed: list[tuple[nn.Module, str]] = []
        self._parameters: list[nn.Parameter] = []
        self.adapted: list[str] = []
        """Names of the linears, embeddings and stacks on this rank that have an update."""
        self.tuned: list[str] = []
        """Names of parameters on this rank that are trained in full."""
        self._modules: list[str] = []
        self.stored: dict[str, Stored] = {}
        """Parameters of the model without updates on this rank."""

    def apply(self, part: nn.Module) -> Applied:
        """Freeze a part, and add updates to those of its weights that the section names.

        Raises:
            ConfigError: for a pattern that matches nothing, a rank above a dimension, and a weight that can't have an
                update.
        """
        part.requires_grad_(False)
        self.stored |= {name: Stored(tuple(one.shape), one.dtype, name) for name, one in part.named_parameters()}
        found = targets(part)
        given = sources(self.folder, self.job, self.stored) if self.folder else {}
        self.sizes.given |= {name: one.size for name, one in given.items()}
        under = [sources(folder, self.job, self.stored) for folder in self.beneath]
        taken = [name for name in found if (name in given if self.folder else self._takes(found[name], part))]
        for one in (one for some in (given, *under) for name, one in some.items() if name in taken):
            self._placed.setdefault(str(one.folder.path), set()).add(one.key)
        whole = in_full(self.folder, self.job, self.stored) if self.folder else {}
        copies = train_copies(part, whole, self.folder, taken) if self.folder else {}
        self.tuned += copies
        if self.folder:
            self._placed.setdefault(str(self.folder.path), set()).update(copies.values())
        self._found += found
        self.adapted += taken
        if self.job.dist.layout.pp == 1:
            expect_matches(self.config, self._found, self.adapted, (name for name, _ in part.named_modules()))
            expect_places(self.folders, [self._placed])
        expect_untied(part, [found[name] for name in taken])
        for name in taken:
            self._adapt(found[name], given.get(name), [some[name] for some in under if name in some])
        self._tune(part, {*(found[name].module for name in taken), *map(part.get_submodule, whole)})
        more = (MAGNITUDE,) if self.config.dora else ()
        factors = {
            name: (
                *found[name].factors,
                *(f"{f}_{one.kind}" for one in self.sizes.fixed[name] for f in found[name].factors),
            )
            for name in taken
        }
        added = (*copies, *(_path(found[name], one) for name in taken for one in (*factors[name], *more)))
        ranks = sorted({self.sizes.of(name)[0] for name in taken})
        return Applied(
            part,
            tuple(taken),
            f"{len(taken)} weights, rank {' and '.join(map(str, ranks))}",
            added=added,
            on_micro_batch=self._look_up,
            after_backward=self._sum,
        )

    def begin(self, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """The run begins: patterns are judged over all stages of a pipeline, and the optimizer's groups are looked at.

        Raises:
            ConfigError: for a pattern that matches nothing, and for an optimizer without learning rates by parameter.
        """
        if self.job.dist.layout.pp > 1:
            names = self.job.dist.gather_objects((self._found, self.adapted, self._modules, self._placed))
            *known, placed = zip(*names, strict=True)
            expect_matches(self.config, *(itertools.chain(*one) for one in known))
            expect_places(self.folders, placed)
        rates = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
        modules = [(name, one) for name, one in model.named_modules() if isinstance(one, Adapted)]
        for name, module in modules:
            for b, ratio in module.lr_factors.items():
                first, second = (rates.get(id(module._parameters[f"{b[:-1]}{factor}"])) for factor in "AB")
                if first and second and not math.isclose(second, first * ratio, rel_tol=1e-6):
                    raise ConfigError(
                        f"lora.lr_ratio: {b} of {name!r} learns at {second:g}, and its lora_A at {first:g}: the "
                        "optimizer does not read `lr_factors`, or its groups change one of the two.",
                        key="lora.lr_ratio",
                    )
        if self.job.dist.main:
            warn_of_new_tokens(model, self.job)
        for name, one in modules:
            if isinstance(one, LowRank):
                self._unchecked[name] = one._parameters["lora_B"]
            elif isinstance(one, LowRankStacks):
                self._unchecked |= {f"{name}.{key}": one._parameters[f"{key}_lora_B"] for key in one.lora_scales}
            elif isinstance(one, Full):
                self._unchecked |= {f"{name}.{key}": one._parameters[key] for key in one.copies}

    def check_used(self) -> None:
        """After the first backward pass.

        Raises:
            ConfigError: for an update without a gradient beside others that have one: the model reads that linear's
                weight past its forward.
        """
        unused = [name for name, factor in self._unchecked.items() if factor is not None and factor.grad is None]
        if 0 < len(unused) < len(self._unchecked):  # all: the optimizer has taken them already
            raise ConfigError(
                f"lora.modules: the model computes {format_list(unused, 4)} without calling the linear, or its experts "
                "by another product, so its update has no effect. Name patterns that leave it out.",
                key="lora.modules",
            )
        self._unchecked = {}

    def _takes(self, target: Target, part: nn.Module) -> bool:
        if self.config.modules:
            return any(fnmatchcase(target.name, pattern) for pattern in self.config.modules)
        units = tuple(f"{unit}." for unit in getattr(part, "units", ()))
        return target.name.startswith(units) and not target.is_embedding and min(target.weight.shape[-2:]) > 1

    def _tune(self, part: nn.Module, adapted: set[nn.Module]) -> None:
        """Train some modules in full.

        Raises:
            ConfigError: for one that has an update, too, and for a tied one, of which PEFT would tune one module alone.
        """
        names: dict[int, list[str]] = {}
        for name, one in part.named_parameters(remove_duplicate=False):
            names.setdefault(id(one), []).append(name)
        self._modules += [name for name, _ in part.named_modules()]
        for path, module in part.named_modules():
            if not any(fnmatchcase(path, pattern) for pattern in self.config.tune):
                continue
            both = next((name for name, one in module.named_modules() if one in adapted), None)
            if both is not None:
                raise ConfigError(
                    f"lora.tune: {'.'.join(filter(None, (path, both)))!r} has an update already: leave it out here, or "
                    "out of lora.modules.",
                    key="lora.tune",
                )
            if tied := next((names[id(one)] for one in module.parameters() if len(names[id(one)]) > 1), None):
                raise ConfigError(
                    f"lora.tune: {' and '.join(map(repr, tied))} are tied, and an adapter can hold only one of them. "
                    "Leave them out, or untie them.",
                    key="lora.tune",
                )
            module.requires_grad_(True)
            self.tuned += [".".join((path, name)) for name, _ in module.named_parameters()]

    def _fixed(self, target: Target, rank: int, scale: float, under: Sequence[Source]) -> tuple[Fixed, ...]:
        """The updates of a weight that are not trained."""
        *_, rows, columns = target.weight.shape
        for one in under:
            one.check(target.name, rows, columns)
        found = [beneath([(one, one.scale) for one in under])] if under else []
        if self.config.start == "pissa":
            if target.is_stack or target.is_embedding:
                kind = "a stack of experts" if target.is_stack else "an embedding"
                raise ConfigError(
                    f"lora.start: {target.name!r} is {kind}, and only linears begin as singular directions. Leave it "
                    "out of lora.modules, or unset lora.start.",
                    key="lora.start",
                )
            found.append(Fixed(START, rank, -scale))
            self._begin.append(target)
        return tuple(found)

    def _adapt(self, target: Target, source: Source | None, under: Sequence[Source]) -> None:
        name, (rank, scale) = target.name, self.sizes.of(target.name)
        *_, rows, columns = target.weight.shape
        if rank > min(rows, columns) and source is None:  # several may lie side by side in a folder
            raise ConfigError(
                f"lora.rank: {rank} is above a dimension of {name!r} ({columns} → {rows}). Set a lower rank, or one "
                "for it alone in lora.groups.",
                key="lora.rank",
            )
        if target.is_stack:
            self._check_stack(target)
        if self.config.dora and (target.is_stack or target.is_embedding):
            raise ConfigError(
                f"lora.dora: {name!r} is {'a stack of experts' if target.is_stack else 'an embedding'}, and only "
                "linears have a magnitude. Leave it out of lora.modules, or set lora.dora = false.",
                key="lora.dora",
            )
        dropout = Dropout(self.config.dropout, self.job, f"{name}.lora") if self.config.dropout else None
        if source is not None:
            source.check(name, rows, columns)
        self.sizes.fixed[name] = self._fixed(target, rank, scale, under)
        adapt(
            target,
            rank,
            scale,
            fixed=self.sizes.fixed[name],
            dropout=dropout,
            lr_ratio=self.config.lr_ratio,
            read=source.read if source else None,
            dora=self.config.dora,
        )
        held = format_of(self.config)
        if held is not None and not target.is_embedding:
            encode(target, held)
        if target.is_stack and self.job.dist.layout.etp > 1:
            # The factor that is whole beside a split one has seen some features of each expert.
            (_, inner), (a, b) = target.module.expert_plan()[target.key], target.factors
            self._summed.append((target.module, a if inner == 1 else b))

    def _check_stack(self, target: Target) -> None:
        if self.config.dropout:
            raise ConfigError(
                f"lora.dropout: {target.name!r} is a stack of experts, whose input has no order of tokens for a mask. "
                "Set lora.dropout = 0, or leave stacks out of lora.modules.",
                key="lora.dropout",
            )
        if getattr(target.module, "is_transposed", False):
            raise ConfigError(
                f"lora.modules: {target.name!r} holds the matrix of each expert transposed, which lora can't adapt. "
                "Name patterns that leave it out.",
                key="lora.modules",
            )

    def _look_up(self, micro: MicroBatch | None = None) -> None:
        """Before the first forward: later on a SHARD transform may show other parameters than the optimizer has."""
        if not self._parameters:
            self._parameters = [module.get_parameter(name) for module, name in self._summed]
        while self._begin:
            target = self._begin.pop(0)
            dist = self.job.dist
            begin(target, *self.sizes.of(target.name), together=dist.world > 1 and dist.layout.pp == 1)

    def _sum(self) -> None:
        """Sum gradients of factors that every rank of an expert has whole."""
        gradients = [local(one.grad) for one in self._parameters if one.grad is not None]
        if gradients:
            flat = torch.cat([one.reshape(-1) for one in gradients])
            torch.distributed.all_reduce(flat, group=self.job.dist.mesh("expert", "etp").get_group())
            pieces = torch.split(flat, [one.numel() for one in gradients])
            torch._foreach_copy_(gradients, [new.view_as(one) for new, one in zip(pieces, gradients, strict=True)])


def _path(target: Target, factor: str) -> str:
    return f"{target.name.rpartition('.')[0] if target.is_stack else target.name}.{factor}"

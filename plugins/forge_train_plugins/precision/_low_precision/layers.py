"""Modules that multiply in low precision: which they are, and how they are made to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from forge_train import ConfigError
from forge_train.mesh.tensors import local
from forge_train_kit.specialisation import Specialisation

from .kernels import ALIGNMENT
from .products import ALONE, GroupedProduct, LinearProduct, Parallel, Recipe


class Product:
    """Product of a module in low precision; given a place for it, records whether any scale was not finite."""

    def __init__(self, recipe: Recipe, parallel: Parallel = ALONE) -> None:
        self.recipe, self.parallel = recipe, parallel
        self.broken: Tensor | None = None

    def look(self, sound: Tensor) -> None:
        if self.broken is not None:
            self.broken.logical_or_(~sound.isfinite())


class Linear(Product):
    """As `torch.nn.functional.linear`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows: Tensor = x.reshape(-1, x.shape[-1])
        out, sound = LinearProduct.apply(rows, weight, self.recipe, self.parallel)  # type: ignore[no-untyped-call]
        self.look(sound)
        out = out.view(*x.shape[:-1], out.shape[-1])
        return out if bias is None else out + bias  # type: ignore[no-any-return]


class Grouped(Product):
    """`rows [rows, in]` sorted by expert, `weight [experts, out, in]`, `sizes [experts]` → `[rows, out]`."""

    def __call__(self, rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
        out, sound = GroupedProduct.apply(rows, weight, sizes, self.recipe)  # type: ignore[no-untyped-call]
        self.look(sound)
        return out  # type: ignore[no-any-return]


class NarrowLinear(nn.Linear):
    """A linear layer whose product is replaceable."""

    product: Linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


@dataclass(frozen=True)
class Candidate:
    """A module that could multiply in low precision."""

    name: str
    module: nn.Module
    experts: bool
    weights: tuple[Any, ...]
    """Its weights, as they are held; the last two axes are `[out, in]`."""

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of this rank's part of each weight, `(out, in)`."""
        return [(int(one.shape[-2]), int(one.shape[-1])) for one in map(local, self.weights)]

    def unfit(self) -> str:
        """Why it can't; empty if it can."""
        if (dtype := getattr(self.module, "compute_dtype", None)) is not None:
            return f"a rule has it compute in {str(dtype).removeprefix('torch.')}"
        if not self.experts and not hasattr(self.module, "product"):
            if type(self.module).forward is not nn.Linear.forward:
                return f"{type(self.module).__name__} has a forward of its own"
            if isinstance(self.weights[0], DTensor):
                return "its weight is split, and its forward does not multiply with `self.product`"
        odd = next((shape for shape in self.shapes if any(size % ALIGNMENT for size in shape)), None)
        return "" if odd is None else f"{odd[1]} → {odd[0]} are not both multiples of {ALIGNMENT}"

    def multiply_with(self, recipe: Recipe, narrow: Specialisation) -> Product:
        """Put a recipe where it multiplies.

        Args:
            recipe: of the module's products.
            narrow: gives linear layers a product that is replaceable.

        Raises:
            ConfigError: if blocks that share a scale would lie on two ranks.
        """
        self._expect_whole_blocks(recipe.block)
        module: Any = self.module
        if self.experts:
            module.product = Grouped(recipe)
        else:
            if not hasattr(module, "product"):
                narrow(module)
            module.product = Linear(recipe, parallel_of(self.weights[0]))
        return module.product  # type: ignore[no-any-return]

    def _expect_whole_blocks(self, block: int) -> None:
        for weight in self.weights:
            for axis, place in _splits(weight):
                size = local(weight).shape[place.dim]
                if block and place.dim >= weight.ndim - 2 and size % block:
                    raise ConfigError(
                        f"{self.name!r}: {axis} splits {weight.shape[place.dim]} features into {size} for each rank, "
                        f"which are no whole blocks of {block} that share a scale: other blocks than on one process "
                        f"would be rounded. Choose a multiple of {block} for each rank, exclude the module, or use "
                        "the plugin fp8, whose scales are the same however features are split."
                    )


def candidates(part: nn.Module) -> list[Candidate]:
    """Linear layers, and modules of the expert domain whose product is replaceable, in the order of the model."""
    found = []
    for name, module in part.named_modules():
        if isinstance(module, nn.Linear):
            found.append(Candidate(name, module, False, (module._parameters["weight"],)))
        elif getattr(module, "domain", "") == "expert" and hasattr(module, "product"):
            weights = tuple(one for one in module._parameters.values() if one is not None and one.ndim == 3)
            found.append(Candidate(name, module, True, weights))
    return found


def _splits(weight: Any) -> Iterable[tuple[str, Shard]]:
    """Mesh axis and placement of each split of a weight over ranks."""
    if isinstance(weight, DTensor):
        names = weight.device_mesh.mesh_dim_names or ()
        for name, place, size in zip(names, weight.placements, weight.device_mesh.shape, strict=True):
            if isinstance(place, Shard) and size > 1:
                yield name, place


def parallel_of(weight: Any) -> Parallel:
    """Return how tensor parallelism splits a linear layer's weight."""
    for name, place in _splits(weight):
        mesh = weight.device_mesh
        return Parallel(mesh.get_group(name).group_name, place.dim)
    return ALONE


@dataclass(frozen=True)
class Rule:
    """A pattern of names, and whether what it matches is to multiply in low precision; later rules win."""

    pattern: str
    take: bool
    key: str
    """Of the configuration."""
    given: bool = True
    """True if the user wrote it, so that it must match something."""

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


def taken(rules: Sequence[Rule], name: str) -> bool:
    """Return the choice of the last rule that matches a name; a name that no rule matches is not taken."""
    return next((rule.take for rule in reversed(rules) if rule.matches(name)), False)


def rules_of(own: str, key: str, patterns: Sequence[str], defaults: Sequence[str], *, take: bool) -> list[Rule]:
    """One rule for each pattern of a list in a plugin's section."""
    return [Rule(pattern, take, f"{own}.{key}", tuple(patterns) != tuple(defaults)) for pattern in patterns]

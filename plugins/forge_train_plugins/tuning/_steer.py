"""The edits of the `steer` plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from forge_train import ConfigError, Job, Model
from forge_train.base.errors import nearest
from forge_train_kit.activations import HeadColumns, OfInput, Positions, head_columns, layer_names


def edits(config: Any, model: Model, job: Job) -> dict[str, Callable[..., Any]]:
    """Pattern → edit.

    Raises:
        ConfigError: for a vector or a head that does not exist.
    """
    found: dict[str, list[Callable[..., Any]]] = {}
    for one in config.add:
        pattern, _, name = one.rpartition("=")
        vector = read(Path(config.path), name.strip())
        found.setdefault(pattern.strip(), []).append(Added(pattern.strip(), vector * config.factor))
    made: dict[str, Callable[..., Any]] = {pattern: _joined(several) for pattern, several in found.items()}
    return made | zeroed(config.zero_heads, model, job)


def read(file: Path, name: str) -> Tensor:
    """A vector of a file.

    Raises:
        ConfigError: if there is none.
    """
    try:
        with safe_open(file, "pt") as tensors:
            names = list(tensors.keys())
            if name not in names:
                raise ConfigError(f"steer.add: {file} has no {name!r}.{nearest(name, names)}")
            vector: Tensor = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"steer.path: {file} can't be read: {error}.") from error
    if vector.ndim != 1 or not vector.is_floating_point():
        raise ConfigError(f"steer.add: {name!r} in {file} is {list(vector.shape)}, and must be a vector [features].")
    return vector


def zeroed(heads: tuple[str, ...], model: Model, job: Job) -> dict[str, Callable[..., Any]]:
    """The edits that zero heads: of the columns by which they reach the residual stream.

    Raises:
        ConfigError: for a head that the model does not have.
    """
    layers = layer_names(model, job)
    modules = dict(model.named_modules())
    columns = {name: head_columns(modules[name], name) for name in layers if name in modules}
    columns = {name: one for some in job.dist.gather_stages(columns) for name, one in some.items()}
    found: dict[HeadColumns, set[int]] = {}
    for one in heads:
        layer, head = map(int, one.split("."))
        if layer >= len(layers):
            raise ConfigError(f"steer.zero_heads: {one}: the model's layers are 0 to {len(layers) - 1}.")
        own = columns[layers[layer]]
        if own is None:
            raise ConfigError(f"steer.zero_heads: {one}: {layers[layer]} shows no heads.")
        if head >= own.heads:
            raise ConfigError(f"steer.zero_heads: {one}: the heads of layer {layer} are 0 to {own.heads - 1}.")
        found.setdefault(own, set()).add(head)
    return {own.projection: OfInput(Zeroed(own.size, tuple(sorted(some)))) for own, some in found.items()}


@dataclass(frozen=True)
class Added:
    """Adds a vector at each position."""

    module: str
    vector: Tensor

    def __call__(self, values: Tensor, positions: Positions | None) -> Tensor:
        if values.shape[-1] != len(self.vector):
            raise ConfigError(
                f"steer.add: {self.module} gives {values.shape[-1]} features, and its vector has {len(self.vector)}."
            )
        return values + self.vector.to(values)


@dataclass(frozen=True)
class Zeroed:
    """Zeroes the columns of some heads."""

    size: int
    heads: tuple[int, ...]

    def __call__(self, values: Tensor, positions: Positions | None) -> Tensor:
        values = values.clone()
        for head in self.heads:
            values[..., head * self.size : (head + 1) * self.size] = 0
        return values


def _joined(several: list[Callable[..., Any]]) -> Callable[..., Any]:
    return lambda values, positions: reduce(lambda x, edit: edit(x, positions), several, values)

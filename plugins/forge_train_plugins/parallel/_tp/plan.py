"""The model's plan, and whether it can be realised. No communication takes place here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from torch import nn

from forge_train import ConfigError
from forge_train.base.errors import nearest
from forge_train.base.format import format_list
from forge_train_kit.model import TensorStyle

STYLES: tuple[TensorStyle, ...] = get_args(TensorStyle)
SPLITTING: Mapping[TensorStyle, type[nn.Module]] = {
    "vocabulary": nn.Embedding,
    "colwise": nn.Linear,
    "rowwise": nn.Linear,
    "partial": nn.Linear,
    "features": nn.RMSNorm,
    "logits": nn.Linear,
}
"""Style → the module it knows how to split."""


@dataclass(frozen=True)
class Entry:
    """One line of a plan that fits its model."""

    name: str
    module: nn.Module
    style: TensorStyle


def read(part: nn.Module, ranks: int, owner: Callable[[nn.Module], str] = lambda module: "") -> list[Entry]:
    """The part's plan.

    Args:
        part: a model's.
        ranks: how many it is to be split over.
        owner: the plugin that a module comes from, for messages.

    Raises:
        ConfigError: if there is none, or with everything that is wrong with it.
    """
    mistakes: list[str] = []
    entries: list[Entry] = []
    for name, style in _declared(part).items():
        try:
            module = part.get_submodule(name)
        except AttributeError:
            mistakes.append(f"{name!r} ({style}): the model has no such module.{_meant(name, part)}")
            continue
        if style not in STYLES:
            known = f"{nearest(str(style), STYLES)} The styles are {', '.join(STYLES)}."
            mistakes.append(
                f"{name!r}: there is no style {style!r}.{known} It is declared by {_declarer(name, part, owner)}."
            )
        elif problem := _problem(Entry(name, module, style), part, ranks):
            mistakes.append(problem)
        else:
            entries.append(Entry(name, module, style))
    if mistakes:
        lines = format_list(_different(mistakes), 6, "\n  ")
        raise ConfigError(f"parallel.tp = {ranks} does not fit {type(part).__name__} and its tensor_plan():\n  {lines}")
    return entries


def _different(mistakes: list[str]) -> list[str]:
    """Keep one of the mistakes that all layers share: the first layer's."""
    first = {re.sub(r"\.\d+\.", ".*.", mistake): mistake for mistake in reversed(mistakes)}
    return [mistake for mistake in mistakes if mistake in first.values()]


def _declared(part: nn.Module) -> Mapping[str, TensorStyle]:
    declare: Callable[[], Any] | None = getattr(part, "tensor_plan", None)
    if declare is None:
        raise ConfigError(
            f"parallel.tp: the model ({type(part).__name__}) declares no tensor_plan(), so tensor parallelism does not "
            "know how to split it; set parallel.tp = 1, or have the model declare one "
            "(forge_train_kit.model.TensorStyle)."
        )
    try:
        plan: Mapping[str, TensorStyle] = declare()
    except TypeError as error:  # the decoder's word for a block that declares none
        raise ConfigError(f"parallel.tp: {error}.") from error
    if not plan:
        raise ConfigError(f"parallel.tp: the tensor_plan() of {type(part).__name__} names no module.")
    return plan


def _declarer(name: str, part: nn.Module, owner: Callable[[nn.Module], str]) -> str:
    """The innermost module around an entry that declares a plan, and whose it is."""
    paths = [name[:at] for at, letter in enumerate(name) if letter == "."]
    around = (part.get_submodule(path) for path in (*reversed(paths), ""))
    module = next(module for module in around if hasattr(module, "tensor_plan"))
    return " of ".join(filter(None, [type(module).__name__, owner(module)]))


def _meant(name: str, part: nn.Module) -> str:
    return nearest(name, [path for path, _ in part.named_modules() if path])


def _problem(entry: Entry, part: nn.Module, ranks: int) -> str:
    """Why an entry can't be realised over that many ranks; empty if it can."""
    name, module, style = entry.name, entry.module, entry.style
    if style == "channels":
        return _split_channels(name, module, part, ranks)
    wanted = SPLITTING.get(style)
    if wanted is None:
        return ""
    if not isinstance(module, wanted) or type(module).forward is not wanted.forward:
        return f"{name!r} ({style}): expected a torch.nn.{wanted.__name__}, found {type(module).__name__}."
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return f"{name!r}: max_norm, scale_grad_by_freq and sparse need the whole table; leave them at default."
        return _uneven(name, "rows", module.num_embeddings, ranks)
    if isinstance(module, nn.RMSNorm):
        size = module.normalized_shape[-1]
        return _even(name, "features", size, _head_dim(name, size, part), ranks)
    assert isinstance(module, nn.Linear)
    if style == "logits":
        return _uneven(name, "outputs", module.out_features, ranks)
    size, kind = (module.in_features, "inputs") if style in ("rowwise", "partial") else (module.out_features, "outputs")
    return _even(name, kind, size, _head_dim(name, size, part), ranks)


def _split_channels(name: str, module: nn.Module, part: nn.Module, ranks: int) -> str:
    sizes = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.ndim}
    if len(sizes) != 1:
        return f"{name!r} (channels): expected parameters of one length along their first axis, found {sorted(sizes)}."
    (size,) = sizes
    return _even(name, "channels", size, _head_dim(name, size, part), ranks)


def _even(name: str, kind: str, size: int, head_dim: int, ranks: int) -> str:
    if size % (ranks * head_dim) == 0:
        return ""
    if head_dim == 1:
        return f"{name!r}: its {size} {kind} can't be split evenly; tp ({ranks}) must divide them."
    heads = size // head_dim
    return (
        f"{name!r}: it has {heads} heads of {head_dim} features, and every rank needs whole ones; "
        f"tp ({ranks}) must divide {heads}."
    )


def _uneven(name: str, kind: str, size: int, ranks: int) -> str:
    """The last rank may have fewer rows, but not none."""
    if -(-size // ranks) * (ranks - 1) < size:
        return ""
    return f"{name!r}: its {size} {kind} in {ranks} pieces of {-(-size // ranks)} leave none for the last rank."


def _head_dim(name: str, size: int, part: nn.Module) -> int:
    """Return the number of features of a head, which must stay together, if the module or its parent declares it."""
    around = part.get_submodule(name.rpartition(".")[0])
    features = getattr(part.get_submodule(name), "head_dim", getattr(around, "head_dim", 1))
    return features if isinstance(features, int) and features > 0 and size % features == 0 else 1

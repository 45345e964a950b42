"""Finding, checking and making the class of the `torch_optimizer` plugin."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from forge_train import ConfigError

from .torch_optimizer import OWN

if TYPE_CHECKING:
    from forge_train import Model

Keys = tuple[str, ...]
ADAM: tuple[Keys, Keys] = ("exp_avg",), ("exp_avg_sq", "max_exp_avg_sq")
MOMENTS: Mapping[str, tuple[Keys, Keys]] = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), ADAM),
    "Adamax": (("exp_avg",), ("exp_inf",)),
    "RMSprop": ((), ("square_avg",)),
    "SGD": (("momentum_buffer",), ()),
}
"""Classes of `torch.optim` → keys of their first and second moment. Their state is made in a step."""
NAME, OPTIONS = "torch_optimizer.name", "torch_optimizer.options"


def find(name: str) -> type[torch.optim.Optimizer]:
    """The class of a name `module:Class`.

    Raises:
        ConfigError: if there is none, or it is not one that can take plain steps.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"{NAME}: expected module:Class, found {name!r}.", key=NAME)
    try:
        home = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{NAME}: {module!r} can't be imported: {error}.", key=NAME) from error
    found = getattr(home, attribute, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        what = "has no such name" if found is None else f"has {type(found).__name__} {attribute}"
        raise ConfigError(
            f"{NAME}: expected a subclass of torch.optim.Optimizer; {module} {what}: {attribute!r}.", key=NAME
        )
    if reason := _unfit(found):
        raise ConfigError(f"{NAME}: {name} {reason}", key=NAME)
    return found


def _unfit(cls: type[torch.optim.Optimizer]) -> str:
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "needs a closure that computes the loss again, and a step has its gradients already."
    if cls is torch.optim.Optimizer:
        return "is what optimizers are made from; name one of them."
    if cls is torch.optim.SparseAdam:
        return "takes sparse gradients only, and no model here gives any."
    if hasattr(cls, "train") and hasattr(cls, "eval"):
        return "must be told of evaluations by train() and eval(); use the plugin schedule_free."
    return ""


def check_sharding(cls: type[torch.optim.Optimizer], name: str, model: Model, exact: Sequence[str]) -> None:
    """Check that the class gives the same result on shards as on whole parameters.

    Raises:
        ConfigError: if that is not known.
    """
    if cls in [getattr(torch.optim, one) for one in exact]:
        return
    for parameter, tensor in model.named_parameters():
        if any(not place.is_replicate() for place in getattr(tensor, "placements", ())):
            raise ConfigError(
                f"{NAME}: {name} is not known to be exact on shards, and {parameter!r} is sharded. Exact are "
                f"{', '.join(exact)} of torch.optim; any class works on one process and with ddp.",
                key=NAME,
            )


def make(
    cls: type[torch.optim.Optimizer], name: str, groups: list[dict[str, Any]], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer over these groups.

    Raises:
        ConfigError: for options that the class does not take.
    """
    taken = inspect.signature(cls).parameters
    anything = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    if "weight_decay" not in taken and not anything and any(group["weight_decay"] for group in groups):
        raise ConfigError(
            f"torch_optimizer.weight_decay: {name} has no weight decay.", key="torch_optimizer.weight_decay"
        )
    known = [one for one in taken if one not in OWN]
    if unknown := [] if anything else [one for one in options if one not in known]:
        raise ConfigError(f"{OPTIONS}: {name} takes no {unknown[0]!r}; it takes {', '.join(known)}.", key=OPTIONS)
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    try:
        return cls(groups, **values)
    except Exception as error:  # whatever a stranger's class does with them
        raise ConfigError(f"{OPTIONS}: {name} refuses them: {error}", key=OPTIONS) from error


def moments(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> tuple[Keys, Keys] | None:
    """Keys of the first and the second moment; None for a class whose state is not known."""
    name = next((one for one in MOMENTS if getattr(torch.optim, one) is cls), None)
    if name is None:
        return None
    first, second = MOMENTS[name]
    return (first if name != "SGD" or options.get("momentum") else ()), second

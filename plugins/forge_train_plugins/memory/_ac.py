"""Activation checkpointing applied to one unit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from forge_train import ConfigError
from forge_train.base.errors import nearest
from forge_train_kit.specialisation import Specialisation

log = logging.getLogger("forge_train")

KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._flash_attention_forward",
        "higher_order.flex_attention",
    ),
    "matmul": ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm", "aten._grouped_mm"),
    "collectives": ("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_reduce"),
}
"""Kind → operations whose results are kept. An all-gather's is not: it is as large as what was split to save memory."""


def recompute(units: Iterable[nn.Module], policy: Policy | None, change: Change | None = None) -> None:
    """Have units compute their activations again in the backward pass.

    Their class changes, not the modules themselves: a module around one would rename its parameters, and a `forward` of
    each unit's own would have torch.compile treat every unit as another.

    Raises:
        PluginError: if a unit's forward is its own already.
    """
    options: dict[str, Any] = {} if policy is None else {"context_fn": partial(contexts, policy)}
    recomputed = Specialisation(partial(change or inside, options=options))
    for unit in units:
        recomputed(unit)


Change = Callable[..., dict[str, Callable[..., Any]]]
"""A module's class, and options of `checkpoint` → the method to replace, and what replaces it."""


def inside(own: type[nn.Module], options: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Inside a compiled region: torch.compile sees which activations are kept."""
    return {"forward": _checkpointed(own.forward, options)}


def around(own: type[nn.Module], options: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Around what torch.compile compiles, which may then break into several graphs."""
    return {"__call__": _checkpointed(own.__call__, options)}


def apart(own: type[nn.Module], options: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Between the compiled graphs around it."""
    return {"forward": torch.compiler.disable(_checkpointed(own.forward, options))}  # type: ignore[no-untyped-call]


def _checkpointed(inner: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(self, *args, **kwargs)
        return checkpoint(inner, self, *args, use_reentrant=False, **options, **kwargs)

    return forward


def breaks(module: nn.Module) -> bool:
    """Return True if part of it has asked torch.compile to leave it alone (`torch.compiler.disable`).

    Inside of a recomputed region torch (2.13) does not compile around that, but drops the whole region.
    """
    return any(
        _left_alone(type(one).forward) or _kernel_breaks(getattr(one, "kernel", None)) for one in module.modules()
    )


def _left_alone(call: Any) -> bool:
    return bool(getattr(call, "_torchdynamo_disable", False))


def _kernel_breaks(kernel: Any) -> bool:
    """The same for a kernel: its class, a function that it holds, or a kernel that it passes to or chooses among."""
    seen, ahead = set[int](), [kernel]
    while ahead:
        one = ahead.pop()
        held = () if id(one) in seen else [*getattr(one, "__dict__", {}).values()]
        if any(map(_left_alone, (type(one).__call__, *held))):
            return True
        seen.add(id(one))
        ahead += [
            inner
            for some in held
            for inner in (some.values() if isinstance(some, Mapping) else [some])
            if callable(inner) and not isinstance(inner, (type, nn.Module))
        ]
    return False


def recompute_broken(units: Sequence[nn.Module], policy: Policy | None) -> None:
    """The same for units that torch.compile can't compile as a whole: what it can compile of them, it does.

    Without a policy, a unit's input is kept. What a policy keeps is seen within a graph only, so that each of a unit's
    children recomputes on its own and the graph breaks between them.
    """
    if policy is None:
        recompute(units, None, around)
        return
    children = [child for unit in units for child in _called(unit)]
    recompute((child for child in children if not breaks(child)), policy)
    recompute((child for child in children if breaks(child)), policy, apart)


def _called(unit: nn.Module) -> Iterator[nn.Module]:
    """Its children, and those of its lists of modules."""
    for child in unit.children():
        if type(child).forward is nn.Module.forward:
            yield from _called(child)
        else:
            yield child


def contexts(policy: Policy) -> Any:
    """The contexts of one forward of a unit, and of its repetition."""
    modes = create_selective_checkpoint_contexts(policy.fresh())  # type: ignore[no-untyped-call]
    compiling = torch.compiler.is_compiling() or get_proxy_mode() is not None  # and tags every operation
    return modes if compiling else tuple(_Only(mode, policy.kinds) for mode in modes)


class _Only(TorchDispatchMode):
    """A mode that sees the operations which a policy is about, and no others.

    torch's own (2.13) expect the repetition to have the very operations of the forward. It has others where a module
    inside of the unit is sharded: its weights are gathered within the unit's forward, unless they still are.
    """

    def __init__(self, mode: Any, kinds: Mapping[Any, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode, self._kinds = mode, kinds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self._kinds:
            return self._mode.__torch_dispatch__(function, types, args, kwargs)
        return function(*args, **(kwargs or {}))


class Policy:
    """Chooses the operations whose results are kept.

    Args:
        kinds: operation → the entry of `ac.save` that names it.
        alternate: keep only every second matrix product.
    """

    def __init__(self, kinds: Mapping[Any, str], *, alternate: bool) -> None:
        self.kinds, self.alternate = kinds, alternate
        self.seen: set[str] = set()
        self._reported = False

    @classmethod
    def of(cls, save: Sequence[str]) -> Policy:
        """Read `ac.save`.

        Raises:
            ConfigError: for a name that is neither a kind nor an operation.
        """
        if {"matmul", "alternate_matmul"} <= set(save):
            raise ConfigError("ac.save: 'matmul' keeps what 'alternate_matmul' would leave out; name one of them.")
        kinds: dict[Any, str] = {}
        for name in save:
            kind = "matmul" if name == "alternate_matmul" else name
            if kind in KINDS:
                kinds |= {operation: name for path in KINDS[kind] for operation in _operations(path)}
            elif found := _operations(name):
                kinds |= dict.fromkeys(found, name)
            else:
                known = [*KINDS, "alternate_matmul"]
                raise ConfigError(
                    f"ac.save: {name!r} is neither one of {', '.join(known)} nor the name of an operation "
                    f"such as aten.mm.default.{nearest(name, known)}"
                )
        return cls(kinds, alternate="alternate_matmul" in save)

    def fresh(self) -> Callable[..., CheckpointPolicy]:
        """The policy of one forward: it counts matrix products from the start, in the repetition too."""
        products = {False: 0, True: 0}

        def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kind = self.kinds.get(operation)
            if kind is None:
                return CheckpointPolicy.PREFER_RECOMPUTE
            self.seen.add(kind)
            if kind == "alternate_matmul":
                products[context.is_recompute] += 1
                if products[context.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE

        return decide

    def report(self) -> None:
        """After the first step: name what was to be kept and never occurred."""
        if not self._reported:
            self._reported = True
            if missing := sorted(set(self.kinds.values()) - self.seen):
                log.warning("ac.save: no unit computed anything of the kind %s.", ", ".join(missing))


def _operations(path: str) -> list[Any]:
    """The overloads of an operation, or the one that is named; none where this torch has no such operation."""
    names = path.split(".")
    found: Any = torch.ops
    for name in names:
        found = getattr(found, name, None)
        if found is None:
            return []
    if isinstance(found, torch._ops.OpOverloadPacket):
        return [getattr(found, overload) for overload in found.overloads()]  # type: ignore[no-untyped-call]
    return [found] if isinstance(found, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)) else []

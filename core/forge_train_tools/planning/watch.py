"""Looking at every operation of torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base classes have no types
    """A context in which `look` is told of every operation after it was done. Tensors that consist of others, as
    DTensors do, are not shown: what is done to the others is."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Any:
        self.begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.end()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if consists_of_others(kind):
                return NotImplemented  # the tensor's own class takes it apart, and this mode is called for each piece
        kwargs = kwargs or {}
        out = self.do(func, args, kwargs)
        if func is not _DEVICE:  # which a fake tensor is asked more often than for anything else
            self.look(func, args, kwargs, out)
        return out

    def begin(self) -> None:
        """Is called when the context is entered."""

    def end(self) -> None:
        """Is called when the context is left."""

    def do(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation."""
        return func(*args, **kwargs)

    def look(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation, its arguments, and what it gave."""


class Together(Watch):
    """Several watches as one context: to enter a context for each costs more than all their looks.

    Args:
        doing: does the operations.
        looking: are told of them, in order.
    """

    def __init__(self, doing: Watch, *looking: Watch) -> None:
        super().__init__()
        self._doing, self._all = doing, (doing, *looking)
        self._looks = [one.look for one in looking]

    def begin(self) -> None:
        for one in self._all:
            one.begin()

    def end(self) -> None:
        for one in reversed(self._all):
            one.end()

    def do(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._doing.do(func, args, kwargs)

    def look(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        for look in self._looks:
            look(func, args, kwargs, out)


class AnyDtype(Watch):
    """Gives fake products of groups of rows in any dtype: torch (2.13) computes them, but knows their shape in bf16
    alone."""

    def do(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **kwargs)
        rows, matrices, *rest = args
        product: Tensor = func(rows.bfloat16(), matrices.bfloat16(), *rest, **kwargs)
        return product.to(rows.dtype)


_DEVICE = torch.ops.prim.device.default


@cache
def consists_of_others(kind: type) -> bool:
    """Return True if tensors of a class, such as DTensor, consist of others."""
    return hasattr(kind, "__tensor_flatten__")

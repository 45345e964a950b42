"""Looking at every operation of torch."""

from __future__ import annotations

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
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # has the tensor's own class take it apart, and this mode called for each piece
        kwargs = kwargs or {}
        out = self.do(func, args, kwargs)
        self.look(func, args, kwargs, out)
        return out

    def do(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation."""
        return func(*args, **kwargs)

    def look(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation, its arguments, and what it gave."""


class AnyDtype(Watch):
    """Gives fake products of groups of rows in any dtype: torch (2.13) computes them, but knows their shape in bf16
    alone."""

    def do(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **kwargs)
        rows, matrices, *rest = args
        product: Tensor = func(rows.bfloat16(), matrices.bfloat16(), *rest, **kwargs)
        return product.to(rows.dtype)

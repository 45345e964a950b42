"""The gradients that FSDP2 keeps whole between the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from .ledger import Ledger


@contextmanager
def unsharded_gradients(ledger: Ledger) -> Iterator[set[int]]:
    """Yields the numbers of their storages, which are found while the block runs.

    FSDP2 (torch 2.13) casts what a backward pass leaves unreduced in one method of its parameters.
    """
    numbers: set[int] = set()
    if not dist.is_available():
        yield numbers
        return
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    original = FSDPParam.to_accumulated_grad_if_needed

    def keep(parameter: Any) -> None:
        original(parameter)
        kept = (parameter.unsharded_accumulated_grad, parameter._unsharded_param.grad)
        numbers.update(ledger.numbers(one for one in kept if one is not None))

    with patch.object(FSDPParam, "to_accumulated_grad_if_needed", keep):
        yield numbers

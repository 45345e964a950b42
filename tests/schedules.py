"""The timetables of torch's own pipeline schedules, made without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules

from forge_train_kit.pipeline import Timetable

NAMES = (
    "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip
V = ("ZBVZeroBubble", "DualPipeV")


def parts_of_a_rank(name: str) -> int:
    """How many the schedules get in tests."""
    return 1 if name in ("GPipe", "1F1B") else 2


def timetable(name: str, ranks: int, micro_batches: int, parts: int = 0) -> Timetable:
    """A schedule's own order of computation.

    Args:
        parts: of a rank; 0 for as many as schedules of the kind get here.
    """
    cls: Any = schedules.get_schedule_class(name)
    parts = parts or parts_of_a_rank(name)
    count = ranks * parts
    if parts == 1 and name in ("GPipe", "1F1B"):
        rows = cls(_stage(0, count, ranks), micro_batches)._get_pipeline_order()
        if name == "1F1B":  # torch 2.13 numbers the last rank's forward passes from 1; its runtime does not use this
            rows[ranks - 1] = [
                one and one._replace(microbatch_index=one.microbatch_index - 1)
                if one and one.computation_type is schedules.FORWARD
                else one
                for one in rows[ranks - 1]
            ]
    else:
        own = (0, count - 1) if name in V else range(0, count, ranks)
        rows = cls([_stage(index, count, ranks) for index in own], micro_batches).pipeline_order
    return Timetable.from_csv(
        "\n".join(
            ",".join("" if one is None else str(one) for one in rows[rank] if one is None or one.is_compute_op)
            for rank in range(ranks)
        )
    )


def _stage(index: int, count: int, ranks: int) -> Any:
    """What a schedule asks of a stage before it runs."""
    return SimpleNamespace(
        stage_index=index, num_stages=count, group_size=ranks, group_rank=0, has_backward=True,
        is_first=index == 0, is_last=index == count - 1, submod=nn.Identity(), stage_index_to_group_rank=None,
    )  # fmt: skip

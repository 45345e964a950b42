"""The updates of a folder of PEFT that a run begins with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from forge_train import ConfigError
from forge_train_kit.hf.start import exported, same_modules
from forge_train_kit.state_map import View

from .folder import Folder
from .sizes import size
from .stacks import Fused, fused, nested

if TYPE_CHECKING:
    from forge_train import Job

    from ..lora import LoRA


@dataclass(frozen=True)
class Source:
    """One update.

    Args:
        key: the module that has it in the folder.
        read: reads a factor, `A` or `B`.
        folder: the folder's path.
    """

    key: str
    read: Callable[[str], Tensor]
    folder: str

    def check(self, name: str, rank: int, rows: int, columns: int) -> None:
        """Raises ConfigError for an update of another rank, or of a weight of another shape."""
        a, b = self.read("A"), self.read("B")
        if (held := a.shape[-2]) != rank:
            raise ConfigError(
                f"lora.rank: {self.folder} holds {held} rows for {name!r}, and the run has {rank}.", key="lora.rank"
            )
        if sorted(found := (b.shape[-2], a.shape[-1])) != sorted((rows, columns)):
            raise ConfigError(
                f"lora.adapter: {self.folder} updates a weight of {found[0]} × {found[1]}, but {name!r} has "
                f"{rows} × {columns}: it is an adapter of another model.",
                key="lora.adapter",
            )


def sources(folder: Folder, job: Job, stored: Mapping[str, View], config: LoRA.Config) -> dict[str, Source]:
    """Linear, embedding or stack → the update that a folder has for it.

    Raises:
        ConfigError: for a model without names in Hugging Face layout, and for an update that lora can't express.
    """
    layout = exported(job)
    if layout is None:
        raise ConfigError("lora.adapter: no plugin knows the Hugging Face names of this model (export_hf).")
    known, path = set(folder.modules), str(folder.path)
    found = {
        own: Source(theirs, partial(folder.read, theirs), path)
        for own, theirs in same_modules(layout, stored).items()
        if theirs in known
    }
    if folder.parameters:
        stacks = fused(job, layout, stored)
        ends = tuple(f".{one}" for one in folder.parameters)
        for theirs, key in nested(stacks, [one for one in stacks if f".{one}".endswith(ends)]).items():
            one = stacks[theirs]
            for at, own in enumerate(one.pieces):
                rank, scale = size(config, own)
                if not math.isclose(folder.scale(theirs), scale):
                    raise ConfigError(
                        f"lora.alpha: {path} scales its update of {theirs!r} by {folder.scale(theirs):g}, and the run "
                        f"scales that of {own!r} by {scale:g}.",
                        key="lora.alpha",
                    )
                found[own] = Source(key, partial(_stack, folder, key, one, at, rank), path)
    return found


def _stack(folder: Folder, key: str, one: Fused, at: int, rank: int, factor: str) -> Tensor:
    """A factor of one of several stacks. Their factors are side by side, if each has its own, or `A` is common."""
    a, b = folder.read(key, "A"), folder.read(key, "B")
    a, b = a.view(one.experts, -1, a.shape[1]), b.view(len(b), -1, one.experts).permute(2, 0, 1)
    start = sum(one.rows[:at])
    b = b[:, start : start + one.rows[at]]
    if len(one.pieces) > 1 and a.shape[1] == len(one.pieces) * rank:
        own, others = b[:, :, at * rank : (at + 1) * rank], b.clone()
        others[:, :, at * rank : (at + 1) * rank] = 0
        if others.any():
            raise ConfigError(
                f"lora.adapter: {folder.path}: the update of {one.name!r} mixes {' and '.join(one.pieces)}, which lora "
                "updates apart.",
                key="lora.adapter",
            )
        a, b = a[:, at * rank : (at + 1) * rank], own
    return (a if factor == "A" else b).contiguous()

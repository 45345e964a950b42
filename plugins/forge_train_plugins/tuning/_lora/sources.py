"""The updates of a folder of PEFT that a run begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import Tensor

from forge_train import ConfigError
from forge_train_kit.hf.start import exported, same_modules
from forge_train_kit.state_map import View

from .folder import Folder
from .sizes import divisor
from .stacks import Fused, fused, nested

if TYPE_CHECKING:
    from forge_train import Job


@dataclass(frozen=True)
class Source:
    """One update.

    Args:
        key: the module that has it in the folder.
        read: reads a factor, `A` or `B`, or the `magnitude` of its rows.
        folder: the folder.
        size: rank and alpha.
    """

    key: str
    read: Callable[[str], Tensor]
    folder: Folder
    size: tuple[int, float]

    @property
    def scale(self) -> float:
        rank, alpha = self.size
        return alpha / divisor(rank, bool(self.folder.config.get("use_rslora")))

    def check(self, name: str, rows: int, columns: int) -> None:
        """Raises ConfigError for an update of another rank, or of a weight of another shape."""
        a, b = self.read("A"), self.read("B")
        if (held := a.shape[-2]) != self.size[0]:
            raise ConfigError(
                f"{self.folder.key}: {self.folder.path} holds {held} rows for {name!r}, and its adapter_config.json "
                f"says {self.size[0]}.",
                key=self.folder.key,
            )
        if sorted(found := (b.shape[-2], a.shape[-1])) != sorted((rows, columns)):
            raise ConfigError(
                f"{self.folder.key}: {self.folder.path} updates a weight of {found[0]} × {found[1]}, but {name!r} has "
                f"{rows} × {columns}: it is an adapter of another model.",
                key=self.folder.key,
            )


def sources(folder: Folder, job: Job, stored: Mapping[str, View]) -> dict[str, Source]:
    """Linear, embedding or stack → the update that a folder has for it.

    Raises:
        ConfigError: for a model without names in Hugging Face layout, and for an update that lora can't express.
    """
    layout = exported(job)
    if layout is None:
        raise ConfigError(f"{folder.key}: no plugin knows the Hugging Face names of this model (export_hf).")
    known = set(folder.modules)
    found = {
        own: Source(theirs, partial(folder.read, theirs), folder, folder.size(theirs))
        for own, theirs in same_modules(layout, stored).items()
        if theirs in known
    }
    rslora = bool(folder.config.get("use_rslora"))
    if folder.parameters:
        stacks = fused(job, layout, stored)
        ends = tuple(f".{one}" for one in folder.parameters)
        for theirs, key in nested(stacks, [one for one in stacks if f".{one}".endswith(ends)]).items():
            rank, alpha = folder.size(theirs)
            scale = alpha / divisor(rank, rslora)
            for own, read in _stacks(folder, key, stacks[theirs]).items():
                rank = read("A").shape[1]
                found[own] = Source(key, read, folder, (rank, scale * divisor(rank, rslora)))
    return found


def _stacks(folder: Folder, key: str, one: Fused) -> dict[str, Callable[[str], Tensor]]:
    """Stack → what reads its factors. Several stacks in a parameter have columns of their own, or all in common."""
    b = _factor(folder, key, one, "B")
    found: dict[str, Callable[[str], Tensor]] = {}
    share = b.shape[2] // len(one.pieces)
    rows = [slice(end - size, end) for end, size in zip(accumulate(one.rows), one.rows, strict=True)]
    columns = [slice(at * share, (at + 1) * share) for at in range(len(rows))]
    rest = b.clone()
    for some, others in zip(rows, columns, strict=True):
        rest[:, some, others] = 0
    if not b.any() or rest.any():
        columns = [slice(None)] * len(rows)
    for name, some, others in zip(one.pieces, rows, columns, strict=True):
        found[name] = partial(_piece, folder, key, one, some, others)
    return found


def _piece(folder: Folder, key: str, one: Fused, rows: slice, columns: slice, factor: str) -> Tensor:
    whole = _factor(folder, key, one, factor)
    return (whole[:, columns] if factor == "A" else whole[:, rows, columns]).contiguous()


def _factor(folder: Folder, key: str, one: Fused, factor: str) -> Tensor:
    """`A`, `[experts, rank, in]`, or `B`, `[experts, out, rank]`."""
    read = folder.read(key, factor)
    if factor == "A":
        return read.view(one.experts, -1, read.shape[1])
    return read.view(len(read), -1, one.experts).permute(2, 0, 1)

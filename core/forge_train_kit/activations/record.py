"""Keeps what modules give during a step, and puts it together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from forge_train.base.errors import ConfigError
from forge_train.contract.batch import Batch
from forge_train.contract.model import Model
from forge_train.plugin.job import Job

from .called import Called
from .layout import Layouts, Piece
from .modules import matched_modules, tensors_in
from .whole import Recorded, joined

Reduce = Literal["none", "mean", "last", "norm"]
"""The part of `[rows, tokens, features]` to keep: all of it; the mean over tokens or the last token,
`[rows, features]`; or the 2-norm of each token, `[rows, tokens]`."""
TOKENS, POSITIONS = "input_ids", "position_ids"


class Recorder:
    """Keeps the outputs of modules while it records, and gives them as one process would compute them.

    It reads and copies, so that no number of the run changes. Modules that activation checkpointing calls again in a
    backward pass are not recorded twice. Every rank makes one, as in `on_start`, and calls `take` equally often.

    Args:
        model: composed.
        job: its job; micro-batches are those of `job.step`.
        patterns: of modules, each of which must match; see `matched_modules`.
        key: the configuration's key that they come from, for messages.
        reduce: what to keep of each activation that has tokens.

    Raises:
        ConfigError: as `matched_modules`, and if all that matches are experts.
    """

    def __init__(self, model: Model, job: Job, patterns: Sequence[str], *, key: str, reduce: Reduce = "none") -> None:
        self._job, self._reduce = job, reduce
        self._layouts = Layouts(model, job)
        self.modules = matched_modules(model, job, patterns, key)
        """Those that are recorded, by global name."""
        self.recording = False
        """Set it to record."""
        self._pieces: dict[str, list[Piece]] = {}
        self._calls: dict[str, int] = {}
        self._heads: dict[str, int] = {}
        """Head → tokens that it was given so far."""
        self._batch: Batch | None = None
        self.by_routing = sorted(name for name in self.modules if self._layouts.by_routing(name))
        """Experts, whose rows are those that a router sent and so have no place in the text: they are left out."""
        for name in self.by_routing:
            del self.modules[name]
        self._check_places(patterns, key)
        self._called = Called(model, self.modules)
        self._handles = [
            module.register_forward_hook(self._on_output)
            for module in {id(one): one for one in self.modules.values()}.values()
        ]

    def close(self) -> None:
        """Take the hooks off the modules."""
        for handle in self._handles:
            handle.remove()
        self._called.close()

    def take(self) -> Recorded | None:
        """Return all that was recorded since the last call, put together on the main process; None on the others. Every
        rank has to call it."""
        pieces, self._pieces, self._batch = self._pieces, {}, None
        names = sorted(self._job.dist.gather_names(list(pieces)))
        found = Recorded()
        for name in names:
            self._job.dist.through_main(pieces.pop(name, []), partial(_add, found, name, self._reduce))
        return found if self._job.dist.main else None

    def _check_places(self, patterns: Sequence[str], key: str) -> None:
        """Raises ConfigError for a pattern that matches experts alone."""
        everybody = self._job.dist.gather_names(list(self.modules))
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in everybody):
                raise ConfigError(
                    f"{key}: {pattern!r} matches experts alone, whose rows are tokens by routing and not by position; "
                    "name the layer around them.",
                    key=key,
                )

    # -- during a step ----------------------------------------------------------------------------

    def _on_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        batch, name = self._job.step.batch, self._called.name(module)
        if self.recording and batch is not None and name in self.modules and not _recomputes():
            self._record(name, output, batch)

    @torch.no_grad()
    def _record(self, name: str, output: Any, batch: Batch) -> None:
        if batch is not self._batch:
            self._begin(batch)
        tensors = list(tensors_in(output))
        start = self._heads.get(name, 0)
        if tensors and self._layouts.is_some_tokens(name, tensors[0][1], batch):
            self._heads[name] = (start + tensors[0][1].shape[1]) % batch.inputs.shape[1]
        call = self._calls[name] = self._calls.get(name, 0) + (start == 0)
        for place, x in tensors:
            key = f"{name}{place if len(tensors) > 1 else ''}{f'#{call}' if call > 1 else ''}"
            self._keep(key, self._layouts.piece(name, x, batch, start=start))

    def _begin(self, batch: Batch) -> None:
        """A micro-batch passes through the model. A pipeline may come back to one after another."""
        self._batch = batch
        self._calls.clear()
        self._heads.clear()
        ids = batch.position_ids
        rows, tokens = batch.inputs.shape[:2]
        if ids is None:
            ids = torch.arange(tokens, device=batch.inputs.device).expand(rows, tokens)
        for key, x in ((TOKENS, batch.inputs), (POSITIONS, ids)):
            piece = self._layouts.piece("", x, batch)
            self._pieces.setdefault(key, []).append(replace(piece, values=piece.values.to("cpu", copy=True)))

    def _keep(self, key: str, piece: Piece) -> None:
        if self._layouts.tp_rank and piece.certain and piece.split is None and self._whole(piece):
            return  # the first rank of the group has the same
        if (kept := REDUCTIONS[self._reduce](piece)) is not None:
            values = kept.values.detach().to("cpu", copy=True)
            self._pieces.setdefault(key, []).append(replace(kept, values=values))

    def _whole(self, piece: Piece) -> bool:
        """True if a rank has all tokens of its rows or slice."""
        return piece.positions is not None and len(piece.positions) * self._layouts.cp >= piece.length


def _add(found: Recorded, name: str, reduce: Reduce, pieces: list[list[Piece]]) -> list[None]:
    """Put one activation together, on the main process."""
    joined(found, name, [one for some in pieces for one in some], norm=reduce == "norm")
    return [None] * len(pieces)


def _mean(piece: Piece) -> Piece | None:
    """Sums over tokens, each divided by the length of the row."""
    if piece.kind != "tokens":
        return piece
    return replace(_of_rows(piece), values=_wide(piece.values).sum(1) / piece.length, added=True)


def _last(piece: Piece) -> Piece | None:
    if piece.positions is None:
        return piece
    at = (piece.positions == piece.length - 1).nonzero()
    return replace(_of_rows(piece), values=piece.values[:, int(at)], positions=None) if len(at) else None


def _norm(piece: Piece) -> Piece | None:
    """Sums of squares, which those of other features are added to."""
    if piece.kind != "tokens":
        return piece
    squares = _wide(piece.values).square()
    return replace(piece, values=squares.flatten(2).sum(2) if squares.ndim > 2 else squares, added=True)


def _of_rows(piece: Piece) -> Piece:
    split = None if piece.split is None else piece.split - 1
    return replace(piece, kind="rows", split=split)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


REDUCTIONS: dict[Reduce, Callable[[Piece], Piece | None]] = {
    "none": lambda piece: piece,
    "mean": _mean,
    "last": _last,
    "norm": _norm,
}


def _recomputes() -> bool:
    """Return True during a backward pass, in which activation checkpointing calls modules a second time."""
    return torch._C._current_graph_task_id() != -1

"""A model looked into by the ranks of a layout: findings of all, put together on the main process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from forge_train.base.errors import ForgeError
from forge_train.compose.compose import compose
from forge_train.contract.batch import MASKED, Batch
from forge_train.mesh.tensors import full_tensor, local
from forge_train.plugin.job import Job
from forge_train.step.forward import Forward
from forge_train_kit.activations import Layouts, Piece, Recorded, attention_weights, layer_names, layers_of
from forge_train_kit.activations.heads import kernel_of
from forge_train_kit.activations.modules import tensors_in
from forge_train_kit.activations.whole import joined
from forge_train_kit.contract import Evaluator
from forge_train_kit.evaluators import measure
from forge_train_kit.layers import AttentionOptions
from forge_train_kit.model import sum_of_slices
from forge_train_kit.model.chunks import chosen
from forge_train_kit.starting import load_extra

from ..inference.batches import UNIT
from ..launching.world import here
from ..offline.opening import run_folder
from ..offline.read_only import ReadOnlyRun
from ..process import prepared
from .asked import Looking
from .found import lens_rows

NORMS, ATTENTION = "norms", "attention."
LENS = ("top", "probability", "rank")
STATE = "look.state"
"""A target: the number of the state that a row is computed from, `[batch]` int64, -1 for rows that do not count."""
_QUERY, _KEY, _SINKS = ":query", ":key", ":sinks"


def worker(
    asked: dict[str, Any], ids: list[int], heads: dict[str, list[int]], out: str, *, lens: bool
) -> dict[str, Any]:
    """The work of each process; the main one writes all numbers to a file."""
    tuples = {name: tuple(asked[name]) for name in ("heads", "plugins", "set")}
    source = Looking(**asked | tuples | {"path": Path(asked["path"])}).source(here().size)
    with prepared(source.setup, ReadOnlyRun(run_folder(source.path))) as job:
        forward = Forward(job, compose(job).model)
        load_extra(job)
        source.load(forward.model, job)
        found = _Looker(forward, ids, heads).found(lens=lens)
        job.dist.on_main(lambda: save_file({name: one.contiguous() for name, one in found.items()}, out))
    return {"code": 0}


class _Texts:
    """A loader of rows of one text, padded on their right; micro-batch k goes to data-parallel rank k mod ranks.

    Args:
        job: the job.
        ids: the tokens.
        count: rows that count, numbered from 0.
        longest: tokens that the model reads at once.
    """

    def __init__(self, job: Job, ids: Sequence[int], count: int, longest: int) -> None:
        size = min(-(-len(ids) // UNIT) * UNIT, max(longest, len(ids)))
        places, own = torch.arange(size)[None], len(ids)
        inputs, labels = torch.zeros(1, size, dtype=torch.int64), torch.full((1, size), MASKED)
        inputs[0, :own] = torch.tensor(ids)
        labels[0, : own - 1] = inputs[0, 1:own]
        more: dict[str, Any] = {}
        if job.hooks.gives("head") != "token_logits":  # tokens may see those behind them
            more = {
                "document_ids": (places >= own).long(),
                "position_ids": torch.where(places < own, places, places - own),
            }
        self._row = Batch(inputs, labels, **more)
        self._count, self._rank, self._ranks, self._taken = count, job.dist.data_rank, job.dist.data_ranks, 0
        self.steps = -(-count // self._ranks)
        """Micro-batches of each rank."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        number = self._taken * self._ranks + self._rank
        self._taken += 1
        return self._row.with_targets({STATE: torch.tensor([number if number < self._count else -1])})

    def state_dict(self) -> dict[str, Any]:
        return {"sequences": self._taken * self._ranks}

    def skip(self, sequences: int) -> None:
        self._taken += sequences // self._ranks

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken = state["sequences"] // self._ranks


class _Looker:
    """This rank's part of the work. Every rank makes one and asks it for the same."""

    def __init__(self, forward: Forward, ids: Sequence[int], heads: Mapping[str, Sequence[int]]) -> None:
        self._forward, self._job, self._ids, self._heads = forward, forward.job, ids, heads
        self._layouts = Layouts(forward.model, forward.job)
        self._layers = layer_names(forward.model, forward.job)
        self._mine = {name: part.get_submodule(name) for part in forward.model.parts for name in layers_of(part)}
        self._pieces: dict[str, list[Piece]] = {}
        self._options: dict[str, AttentionOptions] = {}
        self._lens: dict[int, tuple[Tensor, ...]] = {}

    def found(self, *, lens: bool) -> dict[str, Tensor]:
        """All numbers, by name, on the main process."""
        with self._watched():
            self._read(1, lambda *_: None)
        states = [self._whole(name) for name in ("", *self._layers)]
        found = {
            ATTENTION + name: self._attention(name, self._heads[name]) for name in self._layers if name in self._heads
        }
        if lens:
            found |= self._through_head(self._job.dist.on_main(lambda: states))
        if self._job.dist.main:
            rows = [torch.linalg.vector_norm(x[0, : len(self._ids)].float(), dim=-1) for x in states]
            found[NORMS] = torch.stack(rows)
        return found

    def _read(self, count: int, take: Callable[[nn.Module, Tensor, Batch], None]) -> None:
        longest = min(int(getattr(part, "max_sequence", 1 << 31)) for part in self._forward.model.parts)
        rows = _Texts(self._job, self._ids, count, longest)
        measure(self._forward, Evaluator("look", lambda: rows, take, {}), rows, rows.steps, "forge debug look")

    # -- the first pass ----------------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """A block in which the text's states, queries and keys are kept."""
        undo: list[Callable[[], None]] = []
        for name, layer in self._mine.items():
            if name == self._layers[0]:
                undo.append(layer.register_forward_pre_hook(partial(self._before, name), with_kwargs=True).remove)
            undo.append(layer.register_forward_hook(partial(self._after, name)).remove)
            if name in self._heads and (module := kernel_of(layer)) is not None:
                undo.append(partial(setattr, module, "kernel", module.kernel))
                watched: Any = module
                watched.kernel = partial(self._kernel, name, watched.kernel)
        try:
            yield
        finally:
            for one in undo:
                one()

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._keep("", name, next(x for _, x in tensors_in((args, kwargs))), given=True)

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._keep(name, name, next(x for _, x in tensors_in(output)))

    def _kernel(
        self, name: str, kernel: Any, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Any:
        for end, x in ((_QUERY, query), (_KEY, key)):
            self._keep(name + end, name, x, given=True)
        if (sinks := options.sinks) is not None:
            each = local(sinks)[None, None, :, None].expand(*query.shape[:2], -1, 1)
            self._keep(name + _SINKS, name, each, given=True)
        # Of a text that is learned from its first token on, which is then all of its prefix.
        self._options[name] = replace(options, document_ids=None, dropout=None, sinks=None, prefix_ends=None)
        return kernel(query, key, value, options)

    def _keep(self, key: str, module: str, x: Tensor, *, given: bool = False) -> None:
        batch = self._job.step.batch
        if batch is None or int(batch.targets[STATE][0]) != 0:
            return
        piece = self._layouts.piece(module, x, batch, side="input" if given else "output")
        self._pieces.setdefault(key, []).append(replace(piece, values=piece.values.detach().to("cpu", copy=True)))

    def _whole(self, key: str) -> Tensor:
        """Pieces of all ranks put together, `[1, tokens, …]`, on the main process; empty on others."""
        found = Recorded()

        def add(pieces: list[list[Piece]]) -> list[None]:
            joined(found, key, [one for some in pieces for one in some])
            if key in found.left_out:
                raise ForgeError(f"{key}: can't be put together on this layout: {found.left_out[key]}.")
            return [None] * len(pieces)

        self._job.dist.through_main(self._pieces.pop(key, []), add)
        return found.tensors.get(key, torch.empty(0))

    def _attention(self, name: str, heads: Sequence[int]) -> Tensor:
        everybody = self._job.dist.gather_objects((self._options.get(name), name + _SINKS in self._pieces))
        options = next(one for one, _ in everybody if one is not None)
        query, key = self._whole(name + _QUERY), self._whole(name + _KEY)
        if any(sinks for _, sinks in everybody):
            sinks = self._whole(name + _SINKS)
            options = replace(options, sinks=sinks[0, 0, :, 0] if self._job.dist.main else None)
        if not self._job.dist.main:
            return query
        size = len(self._ids)
        return attention_weights(query[:, :size], key[:, :size], options, heads)[0].float()

    # -- the lens ---------------------------------------------------------------------------------

    def _through_head(self, states: Sequence[Tensor]) -> dict[str, Tensor]:
        """The lens: the model reads the text once for each state, which takes the place of its last layer's. What
        follows there is then called as in any forward pass, by which sharded modules are gathered."""
        last = self._mine.get(self._layers[-1])
        handle = last.register_forward_hook(partial(self._replaced, states)) if last is not None else None
        try:
            self._read(len(states), self._measure)
        finally:
            if handle is not None:
                handle.remove()
        everybody = {at: one for part in self._job.dist.gather_objects(self._lens) for at, one in part.items()}
        rows = [everybody[at] for at in range(len(states))]
        found = {name: torch.stack(column) for name, column in zip(LENS, zip(*rows, strict=True), strict=True)}
        if bool(found["probability"].isnan().any()):
            raise ForgeError(f"The model's logits are NaN after {len(self._ids)} tokens: its weights are damaged.")
        return found

    def _replaced(self, states: Sequence[Tensor], module: nn.Module, args: Any, output: Any) -> Any:
        batch = self._job.step.batch
        if batch is None or (number := int(batch.targets[STATE][0])) < 0:
            return None
        hidden = output[0] if isinstance(output, tuple) else output
        full, back = self._layouts.full(self._layers[-1], hidden, batch)
        places = torch.arange(full.shape[1]) if batch.positions is None else batch.positions.cpu()
        changed = back(states[number][:, places].to(full))
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    def _measure(self, part: nn.Module, hidden: Tensor, batch: Batch) -> None:
        head, labels = part.get_submodule("head"), batch.labels
        length = chosen(labels.numel(), head)
        pieces = zip(torch.split(hidden, length, 1), torch.split(labels, length, 1), strict=True)
        rows = [lens_rows(full_tensor(head(some))[0].float(), asked[0].clamp(min=0)) for some, asked in pieces]
        found = torch.stack([torch.cat(column).double() for column in zip(*rows, strict=True)])
        if batch.positions is not None:  # of slices of the sequence: all of their places
            whole = found.new_zeros(len(found), batch.positions.numel() * self._job.dist.layout.cp)
            found = sum_of_slices(whole.index_copy_(1, batch.positions, found), self._job)
        top, probability, rank = found[:, : len(self._ids)].cpu()
        if (number := int(batch.targets[STATE][0])) >= 0:
            self._lens[number] = (top.long(), probability.float(), rank[:-1].long())

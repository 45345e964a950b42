"""The modules after the last layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import CurrentStep
from forge_train_kit.heads import Trunk
from forge_train_kit.model import Linear, Slots, TensorStyle, flops_per_token

from .ahead import IDS


class Depth(nn.Module):
    """Projects the previous depth's hidden states and the embeddings of the following tokens, then runs one layer.

    `h'ᵢᵏ = Mₖ [RMSNorm(Emb(tᵢ₊ₖ)); RMSNorm(hᵢᵏ⁻¹)]`, `hᵏ = TRMₖ(h'ᵏ)` (arXiv:2412.19437, eq. 21 and 22). The halves
    are in the order of the published weights.
    """

    def __init__(self, trunk: Trunk, layer: nn.Module) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = trunk.norm(), trunk.norm()
        self.projection = Linear(2 * trunk.dim, trunk.dim, std=trunk.std)
        self.layer: Any = layer
        self.norm = trunk.norm()

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """The next depth's input, and its normed version for the head: `[batch, sequence, dim]` each."""
        joined = self.projection(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1))
        hidden = self.layer(joined, position_ids, document_ids, cache)
        return hidden, self.norm(hidden)

    def tensor_plan(self) -> dict[str, TensorStyle]:
        plan: dict[str, TensorStyle] = dict.fromkeys(
            ("embedding_norm", "hidden_norm", "projection", "norm"), "sequence"
        )
        return plan | {f"layer.{path}": style for path, style in self.layer.tensor_plan().items()}

    def flops_per_token(self, sequence: int) -> int:
        projection = flops_per_token(sequence, weights=self.projection.weight.numel())
        return projection + int(self.layer.flops_per_token(sequence))


class Piece(nn.Module):
    """This rank's piece of whole sequences, as layers take it under sequence parallelism; the last may be padded."""

    sequence_piece = (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        at, pieces = self.sequence_piece
        each = -(-x.shape[1] // pieces)
        return F.pad(x, (0, 0, 0, each * pieces - x.shape[1])).narrow(1, at * each, each)


class Depths(nn.Module):
    """All modules. The first takes the model's input to its head, as servers of the published weights do.

    Args:
        trunk: of the model.
        depths: number of modules.
        step: the step under way, whose batches hold the following tokens.
    """

    def __init__(self, trunk: Trunk, depths: int, step: CurrentStep) -> None:
        super().__init__()
        self.depths = depths
        self.embedding = trunk.embedding()
        self.layers = nn.ModuleList(Depth(trunk, trunk.layer(index, depths)) for index in range(depths))
        self.piece, self.whole = Piece(), nn.Identity()
        self._step = step

    def forward(self, hidden: Tensor, position_ids: Tensor | None, document_ids: Tensor | None) -> Tensor:
        """See `forge_train.Tail`."""
        batch = self._step.batch
        if batch is None or IDS not in batch.targets:
            return hidden
        looked_up = self.embedding(torch.cat(batch.targets[IDS].unbind(-1)))
        # One tensor joins all embeddings to the trunk: a pipeline that separates input and weight gradients (torch
        # 2.13) would otherwise traverse the graph between two uses of a weight twice.
        hidden, *embedded = torch.cat((hidden, looked_up)).chunk(1 + self.depths)
        found = [hidden]
        for layer, one in zip(self.layers, embedded, strict=True):
            hidden, normed = layer(hidden, one, position_ids, document_ids)
            found.append(normed)
        return torch.cat(found)

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(f"layers.{index}" for index in range(self.depths))

    def tensor_plan(self) -> dict[str, TensorStyle]:
        plan: dict[str, TensorStyle] = {"embedding": "vocabulary", "piece": "sequence", "whole": "gather"}
        for unit in self.units:
            inner: Any = self.get_submodule(unit)
            plan |= {f"{unit}.{path}": style for path, style in inner.tensor_plan().items()}
        return plan

    def flops_per_token(self, sequence: int) -> int:
        return sum(layer.flops_per_token(sequence) for layer in self.layers)  # type: ignore[operator]

    # -- drafts -----------------------------------------------------------------------------------

    def new_slots(self, depth: int, slots: Slots) -> Any:
        """See `forge_train_kit.heads.Drafting`."""
        layer: Any = self.layers[depth]
        return layer.layer.new_slots(slots)

    def draft(self, depth: int, hidden: Tensor, ids: Tensor, position_ids: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """See `forge_train_kit.heads.Drafting`."""
        embedded = self.embedding(ids)
        after, normed = self.layers[depth](self.piece(hidden), embedded, position_ids, None, cache)
        return self.whole(after), self.whole(normed)

"""Hidden states of a student that are to be those of its teacher."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import MASKED, Applied, ConfigError, Job, Model
from forge_train.base.format import format_list
from forge_train_kit.model import Linear

from ..distill import PROJECTION

Kind = Literal["mse", "cosine"]


class HiddenStates:
    """Remembers what pairs of modules gave, and compares it.

    `mse` is the mean over features of the squared difference (TinyBERT, arXiv:1909.10351, eq. 9), `cosine` is one less
    the cosine of both vectors (DistilBERT, arXiv:1910.01108).
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], kind: Kind, student: Model, teacher: Model, job: Job) -> None:
        """
        Args:
            pairs: patterns of the student's modules, and of the teacher's.
            kind: of the comparison.
            student: the model that learns.
            teacher: the other one, in one part.
            job: the run.

        Raises:
            ConfigError: for patterns that match nothing, or fewer modules of the teacher than of the student.
        """
        self.kind, self.job = kind, job
        mine, theirs = _blocks(student), _blocks(teacher)
        self.pairs = [pair for one, other in pairs for pair in _paired(one, other, mine, theirs)]
        self._seen: dict[str, Tensor] = {}
        for name, other in self.pairs:
            mine[name].register_forward_hook(partial(self._remember, f"student {name}"))
            theirs[other].register_forward_hook(partial(self._remember, f"teacher {other}"))

    def forget(self) -> None:
        """Release what was remembered."""
        self._seen.clear()

    def loss(self, part: nn.Module, labels: Tensor) -> Tensor:
        """The sum over unmasked labels of the mean over the pairs, 0-dim fp32; then forgets.

        Tensor parallelism may give each rank a piece of every sequence. The sum is that of all pieces on every rank,
        and the gradient of each piece is that of its own tokens.

        Raises:
            ConfigError: if student and teacher have vectors of different widths.
        """
        projection = getattr(part, PROJECTION, None)
        sums = [self._compared(one, other, projection, labels) for one, other in self.pairs]
        self.forget()
        return torch.stack(sums).mean()

    def _compared(self, one: str, other: str, projection: nn.Module | None, labels: Tensor) -> Tensor:
        mine, theirs = self._seen[f"student {one}"], self._seen[f"teacher {other}"].float()
        mine = (mine if projection is None else projection(mine)).float()
        if mine.shape[-1] != theirs.shape[-1]:
            raise ConfigError(
                f"distill.hidden: {one!r} of the student gives {mine.shape[-1]:,} features, and {other!r} of the "
                f"teacher {theirs.shape[-1]:,}; set distill.hidden_width = {theirs.shape[-1]} for a projection."
            )
        if self.kind == "mse":
            each = (mine - theirs).square().mean(-1)
        else:
            each = 1 - F.cosine_similarity(mine, theirs, dim=-1)
        if each.shape == labels.shape:
            return (each * (labels != MASKED)).sum()
        group = self.job.dist.mesh("dense", "tp").get_group()
        length, rank = each.shape[1], dist.get_rank(group)
        padded = F.pad(labels, (0, length * dist.get_world_size(group) - labels.shape[1]), value=MASKED)
        piece = (each * (padded[:, rank * length : (rank + 1) * length] != MASKED)).sum()
        total = piece.detach().clone()
        dist.all_reduce(total, group=group)
        return piece + (total - piece.detach())

    def _remember(self, key: str, module: nn.Module, given: Sequence[Any], found: Any) -> None:
        self._seen[key] = found[0] if isinstance(found, tuple) else found


def add_projection(part: nn.Module, width: int) -> Applied:
    """Add the projection of a student's vectors to others of that width, without a bias.

    Raises:
        ConfigError: if the model does not say how wide its vectors are.
    """
    shape = getattr(part, "hidden_shape", None)
    if shape is None:
        raise ConfigError("distill.hidden_width: this model does not declare hidden_shape, which gives its own width.")
    with torch.device("meta"):
        part.add_module(PROJECTION, Linear(shape(1, 1)[-1], width))
    return Applied(part, (PROJECTION,), f"to {width} features", added=(f"{PROJECTION}.weight",))


def _blocks(model: Model) -> dict[str, nn.Module]:
    """The modules between which a model hands a vector for each token on: its embedding and its blocks."""
    embeddings = [name.rpartition(".")[0] for name, role in model.roles.items() if role == "embedding"]
    names = [*dict.fromkeys(embeddings), *(name for part in model.parts for name in getattr(part, "units", ()))]
    modules = dict(model.named_modules())
    return {name: modules[name] for name in names if name in modules}


def _paired(one: str, other: str, student: Mapping[str, Any], teacher: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs of two patterns: the i-th of n modules and the ⌈i · m / n⌉-th of m."""
    mine, theirs = fnmatch.filter(student, one), fnmatch.filter(teacher, other)
    for found, pattern, known, whose in ((mine, one, student, "student"), (theirs, other, teacher, "teacher")):
        if not found:
            raise ConfigError(
                f"distill.hidden: the {whose} has no embedding or block {pattern!r}; it has {format_list([*known], 4)}."
            )
    if len(mine) > len(theirs):
        raise ConfigError(
            f"distill.hidden: {one!r} names {len(mine)} modules of the student, but {other!r} only {len(theirs)} of "
            "the teacher."
        )
    return [(name, theirs[-(-(at + 1) * len(theirs) // len(mine)) - 1]) for at, name in enumerate(mine)]

"""Greedy requests, and what one-by-one recomputation makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge_train.contract.batch import MASKED, Batch
from forge_train.contract.model import Model
from forge_train.mesh.tensors import full_tensor
from forge_train.plugin import hookspecs
from forge_train.plugin.job import Job
from forge_train_tools.generation.drafts import Drafts
from forge_train_tools.generation.engine import run


class Found(NamedTuple):
    id: int
    seen: Tensor


@dataclass
class Greedy:
    """Takes the likeliest token, and keeps the log-probabilities of all."""

    number: int
    ids: list[int]
    most: int
    prompt: int = 0
    done: bool = False
    seen: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)

    def choose(self, logits: Tensor) -> Found:
        return Found(int(logits.argmax()), logits.log_softmax(0))

    def add(self, choice: Found) -> None:
        token, seen = choice
        self.ids.append(token)
        self.seen.append(seen)
        self.done = len(self.ids) == self.prompt + self.most

    @property
    def logs(self) -> Tensor:
        """`[generated tokens, vocabulary]`."""
        return torch.stack(self.seen)


def requests(count: int, *, longest: int = 20, most: int = 12, vocabulary: int = 250) -> list[Greedy]:
    """Requests of many lengths."""
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        size = 1 + (7 * number) % longest
        ids = torch.randint(vocabulary, (size,), generator=generator).tolist()
        made.append(Greedy(number, ids, 1 + (5 * number + 3) % most))
    return made


def generated(job: Job, model: Model, rows: Iterable[Greedy], slots: int, drafts: Drafts | None = None) -> list[Greedy]:
    """All of them in order of their numbers."""
    found = run(job, model, iter(rows), slots=slots, drafts=drafts)
    return sorted(found, key=lambda row: row.number)


@torch.no_grad()
def recomputed(job: Job, model: Model, row: Greedy) -> Greedy:
    """The same request without any cache."""
    (part,), task = model.parts, hookspecs.task(job)
    again = Greedy(row.number, row.ids[: row.prompt], row.most)
    modes = [(one, one.training) for one in part.modules()]
    part.eval()
    while not again.done:
        ids = torch.tensor([again.ids])
        labels = torch.full_like(ids[:, -1:], MASKED)
        outputs = full_tensor(task.outputs(part, part(ids)[:, -1:], Batch(inputs=labels, labels=labels)))
        again.add(again.choose(outputs[0, 0].float()))
    for one, mode in modes:
        one.training = mode
    return again


def worst(found: Sequence[Greedy], wanted: Sequence[Greedy]) -> float:
    """The largest difference of a log-probability; the tokens must be the same."""
    assert [one.ids for one in found] == [one.ids for one in wanted]
    pairs = zip(found, wanted, strict=True)
    return max(float((one.logs - other.logs).abs().max()) for one, other in pairs)


def told(rows: Iterable[Greedy]) -> list[Any]:
    """Plain values of rows, to send between processes."""
    return [(row.number, row.ids, row.logs.tolist()) for row in rows]

"""A micro-batch of answers, and the papers' formulas for its loss, token by token in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from forge_train import MASKED, Batch
from forge_train.contract.batch import TOKENS
from forge_train_contrib._grpo.loader import ADVANTAGE, DRAWN, STALE, with_rows
from forge_train_contrib._grpo.rule import Rule
from forge_train_contrib._grpo.task import Answers
from forge_train_contrib.grpo import GRPO
from forge_train_kit.model import Linear

WORDS, KNOWN, DIM, LENGTHS = 19, 17, 8, (3, 1, 6, 4)
"""Logits, tokens of them, and tokens of the answers."""


class Reference:
    """Another model of the same vocabulary."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.embedding = nn.Embedding(WORDS, DIM)
        self.parts = [nn.ModuleDict({"head": filled(1.0)}).requires_grad_(False)]

    def __call__(self, inputs: Tensor) -> Any:
        return self.embedding(inputs)


def filled(scale: float) -> nn.Module:
    head = Linear(DIM, WORDS)
    nn.init.normal_(head.weight, std=scale)
    return head


def case(stale: tuple[bool, ...] = (False, True, False, True)) -> tuple[nn.ModuleDict, Tensor, Batch]:
    """Four answers after a prompt of three tokens, two of them of an earlier model."""
    torch.manual_seed(0)
    hidden = torch.randn(4, 10, DIM).requires_grad_()
    inputs, labels = (torch.randint(0, KNOWN, (4, 10)) for _ in range(2))
    for row, length in enumerate(LENGTHS):
        labels[row, :3] = labels[row, 3 + length :] = MASKED
    batch = with_rows(Batch(inputs, labels)).with_targets(
        {ADVANTAGE: torch.tensor([1.2, -0.7, 0.4, 2.0]).double(), STALE: torch.tensor(stale)}
    )
    drawn = -1 - 6 * torch.rand(4, 10)  # so that ratios are clipped on both sides
    return nn.ModuleDict({"head": filled(0.7)}), hidden, batch.with_targets({DRAWN: drawn}, axes=TOKENS)


def task_of(observed: Mapping[str, Any] | None = None, **options: Any) -> Any:
    job: Any = SimpleNamespace(models={"reference": Reference()} if options.get("kl") else {})
    task = Answers(job, GRPO.Config(**options), lambda: observed)
    task._rule = Rule.of(task.config, KNOWN)
    return task


def penalised(logits: Tensor, seen: set[int], config: Any) -> Tensor:
    """Logits after the repetition penalty (arXiv:1909.05858)."""
    factors = [config.repetition_penalty if number in seen else 1.0 for number in range(len(logits))]
    return torch.stack([one * by if one < 0 else one / by for one, by in zip(logits, factors, strict=True)])


def by_hand(
    part: nn.ModuleDict,
    hidden: Tensor,
    batch: Batch,
    config: Any,
    reference: Any = None,
    drawable: list[list[list[int]]] | None = None,
) -> tuple[Tensor, float]:
    """The loss and the weight."""
    head = part["head"].weight.double()
    of_rows = []
    for row, labels in enumerate(batch.labels.tolist()):
        terms = []
        for at, token in enumerate(labels):
            if token == MASKED:
                continue
            kept = (drawable[row][at] if drawable else []) or [*range(KNOWN)]
            seen = {*batch.inputs[row, : at + 1].tolist()}
            logits = penalised(head @ hidden[row, at].double(), seen, config)[kept] / config.temperature
            now = logits[kept.index(token)] - logits.exp().sum().log()
            old = batch.targets[DRAWN][row, at].double() if batch.targets[STALE][row] else now.detach()
            ratio, advantage = (now - old).exp(), batch.targets[ADVANTAGE][row]
            bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            term = -torch.minimum(ratio * advantage, bounded * advantage)
            if config.kl:
                theirs = reference.parts[0]["head"].weight.double() @ reference(batch.inputs)[row, at].double()
                theirs = penalised(theirs, seen, config)[kept] / config.temperature
                apart = theirs[kept.index(token)] - theirs.exp().sum().log() - now
                term = term + config.kl * (apart.exp() - apart - 1)
            terms.append(term)
        of_rows.append(torch.stack(terms))
    if config.variant == "dapo":
        return torch.cat(of_rows).sum(), sum(LENGTHS)
    if config.variant == "dr_grpo":
        return torch.stack([one.sum() for one in of_rows]).sum() / config.tokens, len(LENGTHS)
    return torch.stack([one.mean() for one in of_rows]).sum(), len(LENGTHS)

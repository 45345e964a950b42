"""The loss of answers with advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_train import MASKED, Batch, Job
from forge_train.mesh.tensors import full_tensor
from forge_train_kit import hookspecs
from forge_train_kit.model import is_imagined, sum_in_chunks, without_updates
from forge_train_kit.model.chunks import chosen
from forge_train_kit.reference.plugin import REFERENCE

from .loader import ADVANTAGE, DRAWABLE, DRAWN, FIRST, INPUTS, LENGTH, PLACES, STALE
from .rule import Drawable, Rule

KL = 3
"""Place of k3 among the sums of `Objective`."""


@dataclass
class Answers:
    """Each row is an answer after its prompt.

    Args:
        job: the run.
        config: of the plugin.
        observed: gives its metrics, or None in a job without.
        own_reference: whether the reference is the model without its updates.
        moved: whether the model has scored an answer differently from its reference.
    """

    job: Job
    config: Any
    observed: Callable[[], Mapping[str, Any] | None]
    own_reference: bool = False
    moved: bool = False
    _rule: Rule | None = field(default=None, init=False)

    def weight(self, batch: Batch) -> int:
        return int((batch.labels != MASKED if self.config.variant == "dapo" else batch.targets[FIRST]).sum())

    def loss(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        labels, targets, config = batch.labels, batch.targets, self.config
        learned = labels != MASKED
        share = learned.double()
        if config.variant == "grpo":
            share = share / targets[LENGTH][:, None].clamp(min=1)
        elif config.variant == "dr_grpo":
            share = share / config.tokens
        drawable = self._drawable(batch)
        of_rows = [targets[name][:, None].expand(labels.shape) for name in (ADVANTAGE, STALE)]
        along = [targets[PLACES], *of_rows, targets[DRAWN], share]
        reference = self._reference(part, batch, drawable)
        if reference is not None:
            along.append(reference)
        head = part.get_submodule("head")
        metrics = self.observed()
        objective = Objective(head, self.rule, config, metrics is not None, drawable)
        total, seen = sum_in_chunks(objective, head, config.chunk, hidden, labels, *along)
        if metrics is not None:
            self._observe(metrics, seen)
        if self.own_reference and not self.moved and not is_imagined(seen):
            self.moved = bool(seen[KL]) or not bool(seen[0])  # a rank may have slices without an answer
        return total

    def outputs(self, part: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = part.get_submodule("head")(hidden)
        return logits

    @property
    def rule(self) -> Rule:
        if self._rule is None:
            self._rule = Rule.of(self.config, hookspecs.tokenizer(self.job).vocabulary)
        return self._rule

    def _observe(self, metrics: Mapping[str, Any], seen: Tensor) -> None:
        tokens, fresh, entropy, kl, clipped, drift = seen.unbind()
        for name, value, count in (
            ("entropy", entropy, tokens),
            ("kl", kl, tokens),
            ("clipped", clipped, tokens),
            ("drift", drift, fresh),
        ):
            if name in metrics:
                metrics[name].update(value / count.clamp(min=1), weights=count)

    def _drawable(self, batch: Batch) -> Drawable | None:
        entries, inputs = batch.targets.get(DRAWABLE), batch.targets[INPUTS]
        if entries is None and not self.rule.penalises:
            return None
        return Drawable(entries, inputs.numel(), self.rule.vocabulary, inputs if self.rule.penalises else None)

    @torch.no_grad()
    def _reference(self, part: nn.Module, batch: Batch, drawable: Drawable | None) -> Tensor | None:
        """The reference's log-probability of each label, among the ids that could be drawn: `[batch, sequence]` fp64;
        None without a reference."""
        if not self.config.kl:
            return None
        if self.own_reference:
            with without_updates(part):
                hidden = part(batch.inputs, **batch.model_inputs())
                return self._scores(part.get_submodule("head"), hidden, batch, drawable)
        model = self.job.models[REFERENCE]
        hidden = model(batch.inputs, **batch.model_inputs())
        return self._scores(model.parts[-1].get_submodule("head"), hidden, batch, drawable)

    def _scores(self, head: nn.Module, hidden: Tensor, batch: Batch, drawable: Drawable | None) -> Tensor:
        labels, places = batch.labels, batch.targets[PLACES]
        length = max(1, (self.config.chunk or chosen(labels.numel(), head)) // len(labels))
        pieces = zip(*(torch.split(one, length, 1) for one in (hidden, labels, places)), strict=True)
        found = (log_probabilities(self.rule, head(one), its, at, drawable) for one, its, at in pieces)
        return torch.cat([each for each, _ in found], 1)


def log_probabilities(
    rule: Rule, logits: Tensor, labels: Tensor, places: Tensor, drawable: Drawable | None
) -> tuple[Tensor, Tensor]:
    """The log-probability of each label, `[batch, sequence]` fp64 and 0 where it is masked; and those of all tokens,
    `[batch × sequence, vocabulary]`, sharded as the logits are.

    Args:
        rule: how the labels were drawn.
        logits: `[batch, sequence, vocabulary]`.
        labels: `[batch, sequence]`.
        places: their numbers in the micro-batch.
        drawable: what they were drawn from; None for all tokens, whatever was there before.
    """
    size = logits.shape[-1]
    masks = () if drawable is None else (drawable.at(places, size), drawable.seen(places, size))
    scores = rule.scores(logits, *masks)
    known = F.log_softmax(scores.flatten(0, 1), -1)
    each = full_tensor(F.nll_loss(known, labels.flatten(), ignore_index=MASKED, reduction="none"))
    return -each.double().view(labels.shape), known


def ratios(now: Tensor, drawn: Tensor, stale: Tensor) -> Tensor:
    """Of the probability of each label now and when it was drawn; of a fresh one 1, whatever is rounded how."""
    return (now - now.detach().where(~stale, drawn.double())).exp()


@dataclass
class Objective:
    """The loss of a chunk.

    Args:
        head: gives token logits.
        rule: how the labels were drawn.
        config: of the plugin.
        observed: whether the entropy is asked for.
        drawable: what the labels were drawn from; None for all tokens.
    """

    head: nn.Module
    rule: Rule
    config: Any
    observed: bool
    drawable: Drawable | None = None

    def __call__(
        self,
        hidden: Tensor,
        labels: Tensor,
        places: Tensor,
        advantage: Tensor,
        stale: Tensor,
        drawn: Tensor,
        share: Tensor,
        reference: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The loss, 0-dim fp64; and sums over the labels, `[6]`: their number, that of the fresh ones, entropy, k3,
        clipped ratios, and how far the fresh ones' log-probabilities are from those when they were drawn.

        Args:
            hidden: `[batch, sequence, dim]`; all others are `[batch, sequence]`.
            labels: where −100 is masked.
            places: their numbers in the micro-batch.
            advantage: of the answer that a label belongs to.
            stale: whether the model has learned since the label was drawn.
            drawn: its log-probability then.
            share: its weight in the loss.
            reference: the log-probability that the reference gives it.
        """
        config, learned = self.config, labels != MASKED
        now, known = log_probabilities(self.rule, self.head(hidden), labels, places, self.drawable)
        ratio = ratios(now, drawn, stale)
        plain, clipped = ratio * advantage, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage
        losses, k3 = -torch.minimum(plain, clipped), torch.zeros_like(now)
        if reference is not None:
            apart = reference - now
            k3 = apart.expm1() - apart
            losses = losses + config.kl * k3
        with torch.no_grad():
            fresh, entropy = learned & ~stale, torch.zeros_like(now)
            if self.observed:
                known = known.detach()
                entropy = -full_tensor((known.exp() * known).sum(-1)).view(labels.shape)
            sums = [learned, fresh, *(learned * one for one in (entropy, k3, plain > clipped))]
            sums.append(fresh * (now - drawn).abs())
            seen = torch.stack([one.sum(dtype=torch.float64) for one in sums])
        return (losses.where(learned, 0) * share).sum(), seen

"""Judges finished steps, and acts on abnormal ones."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from forge_train import Batch, DivergedError, Job, Model, StepResult, Update

from .judge import AnomalyKind, Judge, Verdict
from .record import Witness

log = logging.getLogger("forge_train")

MOST_HELD = 64
"""Steps whose batches and norms are held until they are judged."""


class Options(Protocol):
    """The section of the plugin."""

    @property
    def not_finite(self) -> str: ...
    @property
    def spike(self) -> str: ...
    @property
    def threshold(self) -> float: ...
    @property
    def window(self) -> int: ...
    @property
    def warmup(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def batches(self) -> int: ...
    @property
    def kept(self) -> int: ...


@dataclass
class Trial:
    """A step that is not judged yet, or not carried out."""

    step: int
    names: Sequence[str] = ()
    """Of the parameters that had gradients."""
    norms: Sequence[tuple[Sequence[int], Tensor]] = ()
    value: Tensor | None = None
    """`[loss is not finite, norm is not finite, loss, norm]`, the largest of all ranks', on the device."""
    batches: Sequence[Batch] = ()
    data_range: tuple[int, int] | None = None
    """Global sequences that it was trained on, once that is known."""
    leave_out: tuple[int, int] = (0, 0)
    """Those that a roll-back leaves out."""
    verdict: Verdict | None = None
    in_row: int = 0
    """Abnormal steps up to this one."""
    judged: bool = False


class Guard:
    """Watches the steps of a run on this rank. All ranks judge the same numbers, so they do the same."""

    def __init__(self, options: Options, author: object) -> None:
        self._options, self._author = options, author
        self._at_once = "skip" in (options.not_finite, options.spike)
        """True if a step is judged before its update, for which the host waits for the device."""
        keeps = options.spike == "warn"
        self.judge = Judge(options.threshold, options.window, options.warmup, keeps_spikes=keeps)
        self._trials: deque[Trial] = deque()
        self._ranges: deque[tuple[int, int]] = deque(maxlen=options.batches)
        self._taken: list[Batch] | None = None
        self._seen = 0
        """Anomalies whose batches were kept."""
        self._returns, self._bad = 0, 0
        """Roll-backs since a checkpoint of a step that was abnormal before, and that step."""

    def start(self, job: Job, model: Model) -> None:
        """The run is composed."""
        self._job = job
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._scaled = job.hooks.provider("loss_scale") is not None

    # -- one step --------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: its micro-batches are held."""
        self._taken = []
        try:
            yield
        finally:
            if self._trials and self._trials[-1].data_range is None:
                self._trials[-1].batches = self._taken
            self._taken = None

    def take(self, batch: Batch) -> Batch:
        """A micro-batch goes by, of a step or of an evaluation."""
        if self._taken is not None and self._options.kept:
            self._taken.append(batch)
        return batch

    def gradients(self, update: Update) -> None:
        """The gradients of a step are there."""
        if update.vetoed:
            return
        count, names = sum(len(places) for places, _ in update.norms), self._names
        if count < len(names):
            pairs = zip(names, update.parameters, strict=True)
            names = [name for name, parameter in pairs if parameter.grad is not None]
        trial = Trial(update.step, names, update.norms, self._together(update.loss, update.grad_norm))
        self._trials.append(trial)
        if len(self._trials) > MOST_HELD:
            held = self._trials[-1 - MOST_HELD]
            held.batches, held.norms = (), ()
        if self._at_once:
            self._read()
            if trial.verdict and self._policy(trial.verdict.kind) == "skip":
                update.veto(trial.verdict.text)

    def end(self, step: StepResult) -> None:
        """A step is done."""
        self._ranges.append(step.data_range)
        if self._trials and self._trials[-1].step == step.step:
            trial = self._trials[-1]
            trial.data_range, trial.leave_out = step.data_range, (self._ranges[0][0], step.data_range[1])
            if step.skipped and not trial.verdict:  # another plugin has seen to it
                self._trials.pop()
        if self._at_once or self._job.logs(step.step):
            self.settle()

    def settle(self) -> None:
        """Judge the steps since the last call, and act on abnormal ones."""
        self._read()
        trials, self._trials = self._trials, deque()
        for trial in trials:
            if trial.verdict:
                self._act(trial, trial.verdict)
            if self._job.control.rolls_back:  # the steps after it are about to be repeated
                return

    def saved(self, step: int) -> None:
        """A checkpoint was saved."""
        if step >= self._bad:
            self._returns = 0

    def loaded(self) -> None:
        """The run is at a checkpoint; nothing is on trial any more."""
        self._trials.clear()
        self._ranges.clear()

    # -- judgement -------------------------------------------------------------------------------

    def _together(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Combine loss and norm over ranks: a norm of replicated gradients may be NaN on one rank alone."""
        both = torch.stack([loss.detach().float(), norm.detach().float()])
        value = torch.cat([(~torch.isfinite(both)).float(), torch.nan_to_num(both, 0.0, 0.0, 0.0)])
        return self._job.dist.all_reduce(value, "max")

    def _read(self) -> None:
        """Here the host waits for the device, once for all steps on trial."""
        values = [(trial, trial.value) for trial in self._trials if not trial.judged and trial.value is not None]
        if not values:
            return
        read = torch.stack([value for _, value in values]).tolist()
        for (trial, _), value in zip(values, read, strict=True):
            loss, norm = (None if broken else number for broken, number in zip(value[:2], value[2:], strict=True))
            trial.judged = True
            if norm is None and loss is not None and self._scaled:
                continue  # an overflow, which the loss scale is there for
            trial.verdict, trial.in_row = self.judge.step(loss, norm), self.judge.in_row

    def _policy(self, kind: AnomalyKind) -> str:
        return self._options.not_finite if kind == "not_finite" else self._options.spike

    def _act(self, trial: Trial, verdict: Verdict) -> None:
        policy, job = self._policy(verdict.kind), self._job
        if policy == "warn" and trial.in_row > 1:
            return
        keep = self._seen < self._options.kept
        self._seen += keep
        witness = Witness(trial.step, verdict.kind, verdict.text, policy, trial.data_range or (0, 0))
        suspect, file = witness.record(trial.names, trial.norms, trial.batches if keep else (), job, self._author)
        reason = f"{verdict.text}{suspect}"
        if job.dist.main:
            done = {"skip": "is skipped", "roll_back": "is rolled back"}.get(policy, "is abnormal")
            log.warning("Step %d %s: %s.%s", trial.step, done, reason, f" Its batch is in {file}." if file else "")
            job.run.event("anomaly", trial.step, kind=verdict.kind, reason=reason)
        if policy == "stop":
            raise _diverged(trial, reason)
        if policy == "skip" and trial.in_row > self._options.most:
            raise _diverged(trial, reason, f", after {self._options.most} skipped steps in a row (anomaly.most)")
        if policy == "roll_back":
            self._returns, self._bad = self._returns + 1, max(self._bad, trial.step)
            if self._returns > self._options.most:
                raise _diverged(trial, reason, f", after {self._options.most} roll-backs in a row (anomaly.most)")
            why = f"step {trial.step}: {reason}"
            job.control.roll_back(why, before=trial.step, leave_out=[trial.leave_out], agreed=True)

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.judge.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.judge.load_state_dict(state)


def _diverged(trial: Trial, reason: str, after: str = "") -> DivergedError:
    return DivergedError(
        f"Training diverged at step {trial.step}{after}: {reason}. Try a lower learning rate, more warm-up, or "
        "train.clip_norm."
    )

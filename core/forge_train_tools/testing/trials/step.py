"""Trials of what makes a step: task, loss, executor and spans."""

from __future__ import annotations

from contextlib import suppress
from typing import get_args

import torch

from forge_train.contract.batch import MASKED, MicroBatch
from forge_train.contract.model import Model
from forge_train.contract.protocols import SpanName
from forge_train.contract.transform import Applied
from forge_train.plugin import hookspecs
from forge_train_kit.fitting import takes
from forge_train_kit.losses import LossFunction

from ..bench import LABELS, TOKENS, Bench, OpaqueHead, Oracle, Trials, close, cut_at, hidden_states, scalar
from ..conformance import DoubtError, SkippedError, require

VOCABULARY = 61


def task_sums(bench: Bench) -> None:
    """Loss and weight of a batch are those of its rows together, so that any micro-batching gives the same mean."""
    model, task, (batch,) = bench.model(), bench.answer("task"), bench.batches(1)
    together = getattr(task, "rows_together", 1)
    if 1 < together >= len(batch.inputs):
        raise SkippedError(f"its losses are of {together} rows, and a micro-batch has no more; set train.micro_batch")
    whole, parts = [batch], cut_at(batch, together)
    weights = [sum(float(task.weight(one)) for one in some) for some in (whole, parts)]
    require(weights[0] > 0, f"the weight of a batch is {weights[0]}")
    require(weights[0] == weights[1], f"the weight of a batch is {weights[0]}, that of its rows {weights[1]}")
    losses = [[scalar(Oracle(model, task).loss(one), "the loss") for one in some] for some in (whole, parts)]
    close(losses[0][0], torch.stack(losses[1]).sum(), "the loss of a batch against its rows' (a sum)")


def task_gives_outputs(bench: Bench) -> str:
    model, task, (batch,) = bench.model(), bench.answer("task"), bench.batches(1)
    with torch.no_grad():
        outputs = task.outputs(model.parts[-1], hidden_states(model, batch), batch)
    require(len(outputs) == len(batch.inputs), f"outputs has {len(outputs)} rows for {len(batch.inputs)} sequences")
    require(bool(torch.isfinite(outputs).all()), "outputs are not finite")
    return str(list(outputs.shape))


def _loss_case() -> tuple[torch.Tensor, OpaqueHead, torch.Tensor]:
    hidden = torch.randn(4, 12, 16, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (4, 12))
    labels[torch.rand(labels.shape) < 0.3] = MASKED
    return hidden, OpaqueHead(16, VOCABULARY), labels


def _loss_function(bench: Bench) -> LossFunction:
    taken = takes(bench.enabled, bench.enabled.provides, bench.setup.hooks.specs)
    if TOKENS not in taken.get("head", (TOKENS,)) or LABELS not in taken.get("task", (LABELS,)):
        raise SkippedError(f"it does not take {TOKENS} and {LABELS}; `task` tries it with what it takes")
    function: LossFunction = bench.answer("loss")
    return function


def loss_sums(bench: Bench) -> None:
    function, (hidden, head, labels) = _loss_function(bench), _loss_case()
    whole = scalar(function(hidden, head, labels), "the loss")
    require(whole.dtype == torch.float32, f"the loss must be float32, is {whole.dtype}")
    halves = [function(hidden[part], head, labels[part]) for part in (slice(0, 2), slice(2, 4))]
    close(whole, halves[0] + halves[1], "the loss of a batch against its halves' (a sum over tokens)")
    require(head.calls > 0, "it does not call the head, which may be sharded")
    gradients = torch.autograd.grad(whole, [hidden, *head.parameters()])
    require(all(bool(torch.isfinite(one).all()) for one in gradients), "gradients are not finite")
    require(all(float(one.abs().sum()) > 0 for one in gradients), "hidden states or the head get no gradient")


def loss_ignores_masked(bench: Bench) -> None:
    function, (hidden, head, labels) = _loss_function(bench), _loss_case()
    masked = labels == MASKED
    loss = function(hidden, head, labels)
    (gradient,) = torch.autograd.grad(loss, hidden)
    require(not gradient[masked].any(), "masked positions get a gradient")
    changed = hidden.detach().clone()
    changed[masked] += 1
    close(function(changed, head, labels), loss.detach(), "the loss after masked positions were changed", 1e-6)
    nothing = scalar(function(hidden, head, torch.full_like(labels, MASKED)), "the loss of masked labels alone")
    nothing = nothing.detach()
    require(float(nothing) == 0.0, f"the loss of masked labels alone is {float(nothing)}, not 0")


def executor_accumulates(bench: Bench) -> None:
    model, batches = bench.model(), bench.batches(2)
    task = hookspecs.task(bench.job)
    executor = bench.answer("executor", model=model, task=task)
    oracle = Oracle(bench.model(), task)
    expected = oracle.train(batches, 0.25)
    total = scalar(executor.train(batches, 0.25), "the loss sum")
    require(not total.requires_grad, "the loss sum must be detached")
    close(total.float(), torch.tensor(expected), "the loss sum, unscaled")
    wanted = dict(oracle.model.named_parameters())
    for name, parameter in model.named_parameters():
        other = wanted[name].grad
        if other is None:
            continue
        require(parameter.grad is not None, f"{name} has no gradient")
        assert parameter.grad is not None
        close(parameter.grad, other, f"gradient of {name}", 1e-5)
    executor.train(batches, 0.25)
    for name, parameter in model.named_parameters():
        other = wanted[name].grad
        if other is not None and parameter.grad is not None:
            close(parameter.grad, 2 * other, f"gradient of {name} after a second call, which adds", 1e-5)


def executor_tells_the_last(bench: Bench) -> None:
    told: list[MicroBatch] = []
    parts = bench.model().parts
    model = Model(parts, [(0, Applied(parts[0], on_micro_batch=told.append))])
    bench.answer("executor", model=model, task=hookspecs.task(bench.job)).train(bench.batches(3), 1.0)
    last = [one.last for one in told if one.direction != "backward"]
    require(last == [False, False, True], f"model.on_micro_batch(last) was told {last} over three micro-batches")


def executor_evaluates(bench: Bench) -> None:
    model, (batch,) = bench.model(), bench.batches(1)
    task = hookspecs.task(bench.job)
    model.train(False)
    loss = scalar(bench.answer("executor", model=model, task=task).evaluate(batch), "the loss sum")
    require(not loss.requires_grad, "an evaluation must keep no graph")
    require(not any(parameter.grad is not None for parameter in model.parameters()), "an evaluation leaves gradients")
    close(loss.float(), Oracle(model, task).loss(batch).detach().float(), "the loss sum of an evaluation")


def spans_nest(bench: Bench) -> str:
    around = []
    for span in get_args(SpanName):
        factory = bench.answer("around", span=span)
        if factory is None:
            continue
        require(callable(factory), f"{span}: expected a factory of context managers, found {type(factory).__name__}")
        around.append(span)
    if not around:
        raise SkippedError("it is around no span")
    for span in around:
        factory = bench.answer("around", span=span)
        first, second = factory(), factory()
        for manager in (first, second):
            require(hasattr(manager, "__enter__"), f"{span}: the factory gives a {type(manager).__name__}")
        if first is second:
            raise DoubtError(f"{span}: the factory gives the same object every time")
    return ", ".join(around)


def spans_let_errors_through(bench: Bench) -> None:
    class PassingError(Exception):
        pass

    for span in get_args(SpanName):
        factory = bench.answer("around", span=span)
        if factory is None:
            continue
        try:
            manager = factory()
            manager.__enter__()
        except Exception as error:  # before on_start, some need what is not there yet
            raise SkippedError(f"{span} can't be entered before a run: {error}") from error
        swallowed = False
        with suppress(PassingError):
            swallowed = bool(manager.__exit__(PassingError, PassingError(), None))
        require(not swallowed, f"{span}: it swallows exceptions")


TRIALS: Trials = {
    "task": [("loss and weight are sums over rows", task_sums), ("gives outputs", task_gives_outputs)],
    "loss": [("is a sum over tokens", loss_sums), ("ignores masked labels", loss_ignores_masked)],
    "executor": [
        ("accumulates the right gradients", executor_accumulates),
        ("tells the model the last micro-batch", executor_tells_the_last),
        ("evaluates", executor_evaluates),
    ],
    "around": [("gives factories", spans_nest), ("lets errors through", spans_let_errors_through)],
}

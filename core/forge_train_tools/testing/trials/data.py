"""Trials of data, tokenizers and steps of preparation."""

from __future__ import annotations

import json
from typing import Any, Literal

import torch

from forge_train.base.errors import ConfigError
from forge_train.contract.batch import MASKED, Batch, PrepareBatch, PrepareStep
from forge_train.contract.protocols import Loader
from forge_train_kit import hookspecs

from ..bench import LABELS, Bench, Trials
from ..conformance import DoubtError, SkippedError, require


def _take(loader: Loader, count: int) -> list[Batch]:
    return [next(loader) for _ in range(count)]


def _same(a: list[Batch], b: list[Batch]) -> bool:
    pairs = [(x.tensors(), y.tensors()) for x, y in zip(a, b, strict=True)]
    return all(x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in pairs)


def _sequences(bench: Bench, micro_batches: int) -> int:
    return micro_batches * int(bench.job.config.train.micro_batch)


def gives_batches(bench: Bench) -> str:
    train = bench.job.config.train
    shape = [train.micro_batch, train.sequence]
    for batch in _take(bench.loader("train"), 3):
        require(isinstance(batch, Batch), f"expected a Batch, found {type(batch).__name__}")
        require(not batch.problem(), batch.problem())
        tokens = bench.job.hooks.gives("task") == LABELS
        for name, tensor in batch.tensors().items():
            if name in {*batch.extras, *batch.targets} or (name == "labels" and not tokens):
                continue
            axes, size = ("[batch]", shape[:1]) if name == "sample_ids" else ("[batch, sequence]", shape)
            require(list(tensor.shape) == size, f"{name} must be {axes} = {size}, is {list(tensor.shape)}")
            require(tensor.dtype == torch.int64, f"{name} must be int64, is {tensor.dtype}")
        require(int(batch.inputs.min()) >= 0, "inputs holds negative token ids")
        labels = batch.labels[batch.labels != MASKED]
        require(
            not tokens or not len(labels) or int(labels.min()) >= 0, f"labels holds negative ids other than {MASKED}"
        )
        if bench.job.hooks.provider("tokenizer"):
            limit = hookspecs.tokenizer(bench.job).vocabulary
            require(int(batch.inputs.max()) < limit, f"inputs holds ids beyond the tokenizer's {limit}")
    return f"{shape[0]} × {shape[1]}"


def names_classes(bench: Bench) -> str:
    first, again = (bench.answer("classes") for _ in range(2))
    require(first == again, "two calls give different classes")
    require(len(first.names) > 1, f"expected the names of at least two classes, found {len(first.names)}")
    require(len({*first.names}) == len(first.names), "a name appears twice")
    return f"{len(first.names)} classes of {first.of}s"


def is_the_same_every_time(bench: Bench) -> None:
    first, second = (_take(bench.loader("train"), 4) for _ in range(2))
    require(_same(first, second), "two loaders of one job give different batches")
    require(not _same(first[:1], first[1:2]), "the first two batches are equal")


def goes_on_from_its_state(bench: Bench) -> None:
    loader = bench.loader("train")
    _take(loader, 3)
    state = _json(loader.state_dict())
    position = state.get("sequences")
    require(
        position == _sequences(bench, 3),
        f"after 3 micro-batches the state's position is {position!r}, not the {_sequences(bench, 3)} sequences given",
    )
    expected = _take(loader, 3)
    other = bench.loader("train")
    _take(other, 1)
    other.load_state_dict(state)
    require(_same(_take(other, 3), expected), "after load_state_dict it gives other batches")


def _json(state: Any) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(json.dumps(state))
    except TypeError as error:
        raise ConfigError(f"the loader's state must be JSON: {error}") from error
    require(read == state, "the loader's state changes on its way through JSON")
    return read


def feeds_any_number_of_ranks(bench: Bench) -> None:
    alone = _take(bench.loader("train"), 4)
    pair = [bench.loader("train", rank, 2) for rank in range(2)]
    given = [_take(loader, 2) for loader in pair]
    require(
        _same([given[0][0], given[1][0], given[0][1], given[1][1]], alone),
        "micro-batch g must go to data-parallel rank g mod ranks: two ranks together get other batches than one",
    )
    require(pair[0].state_dict() == pair[1].state_dict(), "the state differs between ranks")
    one = bench.loader("train")
    _take(one, 2)
    for rank, loader in enumerate(pair):
        loader.load_state_dict(one.state_dict())
        require(_same(_take(loader, 1), [alone[2 + rank]]), "two ranks do not go on where one rank stopped")


def skips(bench: Bench) -> None:
    loader, expected = bench.loader("train"), _take(bench.loader("train"), 4)
    _take(loader, 1)
    loader.skip(_sequences(bench, 2))
    require(_same(_take(loader, 1), expected[3:]), "skip does not move on by that many sequences")


def evaluates_on_the_same(bench: Bench) -> None:
    split: Literal["validation"] = "validation"
    try:
        loader = bench.loader(split)
    except ConfigError as error:
        raise DoubtError(f"it has no held-out data here: {error}") from error
    first = _take(loader, 2)
    loader.load_state_dict({"sequences": 0})
    require(_same(_take(loader, 2), first), "an evaluation starts over at position 0, and gets other batches there")


def tokenizer_goes_round(bench: Bench) -> str:
    tokenizer = bench.answer("tokenizer")
    size = tokenizer.vocabulary
    require(isinstance(size, int) and size > 0, f"vocabulary must be a positive number, found {size!r}")
    require(tokenizer.end is None or 0 <= tokenizer.end < size, f"end is {tokenizer.end!r}, of {size} ids")
    for name in ("begin", "stops"):
        ids = getattr(tokenizer, name)
        require(isinstance(ids, tuple), f"{name} must be a tuple of ids, is {ids!r}")
        require(all(0 <= one < size for one in ids), f"{name} is {ids!r}, of {size} ids")
    require(tokenizer.end is None or tokenizer.end in tokenizer.stops, "stops does not hold end")
    again = bench.answer("tokenizer").digest
    require(isinstance(tokenizer.digest, str) and tokenizer.digest == again, "digest must be the same text each time")
    for text in ("the byte that comes next\n", "    def f(x): return x ** 2  # ok", "naïve – 数 🙂"):
        ids = tokenizer.encode(text)
        require(all(isinstance(one, int) and 0 <= one < size for one in ids), f"{text!r} gives ids beyond {size}")
        back = tokenizer.decode(ids)
        if text.isascii():
            require(back == text, f"{text!r} comes back as {back!r}")
        elif back != text:
            raise DoubtError(f"{text!r} comes back as {back!r}")
    require(tokenizer.encode("") == [], "the empty text has tokens")
    return f"{size} ids"


def prepares(bench: Bench) -> None:
    answer = bench.answer("prepare_batch")
    answers = [answer] if isinstance(answer, (PrepareBatch, PrepareStep)) else list(answer or ())
    if not answers:
        raise SkippedError("it has nothing to do here")
    changes = sorted((one for one in answers if isinstance(one, PrepareBatch)), key=lambda one: one.phase)
    (batch,) = _take(bench.loader("train"), 1)
    before = {name: tensor.clone() for name, tensor in batch.tensors().items()}
    done = batch
    for one in changes:
        done = one.apply(done)
        require(isinstance(done, Batch), f"expected a Batch, found {type(done).__name__}")
        require(not done.problem(), done.problem())
        require(done.inputs.device.type == "cpu", "it moved the batch off the CPU, which is core's to do")
    for change in answers:
        if isinstance(change, PrepareStep):
            found = change.apply([batch])
            require(
                isinstance(found, (list, tuple)) and len(found) == 1, f"expected one batch for one, found {found!r:.40}"
            )
            require(isinstance(found[0], Batch), f"expected a Batch, found {type(found[0]).__name__}")
            require(not found[0].problem(), found[0].problem())
    now = batch.tensors()
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, now[name])]
    if changed:
        raise DoubtError(f"it changes {', '.join(changed)} in place, which the loader may still hold")


TRIALS: Trials = {
    "classes": [("names classes", names_classes)],
    "build_data": [
        ("gives batches", gives_batches),
        ("is the same every time", is_the_same_every_time),
        ("continues from its state", goes_on_from_its_state),
        ("feeds any number of ranks", feeds_any_number_of_ranks),
        ("skips", skips),
        ("evaluates on the same", evaluates_on_the_same),
    ],
    "tokenizer": [("text goes round", tokenizer_goes_round)],
    "prepare_batch": [("gives a batch for a batch", prepares)],
}

"""Asking a trained model on the device: answers, log-likelihoods, memory of caches, activations seen and changed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from forge_train_kit import hookspecs
from forge_train_tools import infer
from forge_train_tools.generation.engine import generating, run
from forge_train_tools.generation.forwards import Forwards
from forge_train_tools.generation.generate import Generation, generate
from forge_train_tools.generation.memory import memory_for
from forge_train_tools.generation.rows import TextRow
from forge_train_tools.generation.sampling import Sampling
from forge_train_tools.testing import TinyRun, run_forge

from .attention import largest
from .case import Row, Size
from .machine import ROOT
from .runs import folder, small

sys.path.append(str(ROOT / "tests"))

import capture_cases
import steer_cases

NEAR = 1e-5
"""Relative difference of log-probabilities in fp32 that is rounding."""
BATCHES, OTHER = (1, 3, 8), 4
"""Requests at once on the device, and those of the run on the CPU."""
TEXT = "the model reads a line of text and says which byte is next so that its loss falls step by step\n"
MODEL = {
    "decoder.dim": 768,
    "decoder.layers": 12,
    "decoder.heads": 12,
    "decoder.kv_heads": 12,
    "decoder.hidden": 2048,
    "decoder.vocabulary": 16384,
    "decoder.max_sequence": 1024,
    "train.precision": "bf16",
}
"""110 million weights."""
TOY = {"decoder.dim": 32, "decoder.layers": 2, "decoder.heads": 4, "decoder.kv_heads": 4, "decoder.hidden": 64}
TOY |= {"decoder.vocabulary": 320}


@contextmanager
def trained(size: Size) -> Iterator[Path]:
    """A run in fp32, without TF32."""
    torch.set_float32_matmul_precision("highest")
    steps = size.choose(20, 2)
    with folder() as one:
        yield run_forge((), small(size, **{"checkpoint.every": steps}), steps=steps, folder=one).run


def texts(count: int, longest: int) -> list[str]:
    """Of two characters to so many."""
    line = TEXT * (longest // len(TEXT) + 2)
    lengths = [2 + (longest - 2) * number // (count - 1) for number in range(count)]
    return [line[number % 64 :][:length] for number, length in enumerate(lengths)]


def answers(size: Size) -> list[Row]:
    """Answers in fp32, likeliest and drawn: the CPU's, however many are generated at once."""
    prompts, tokens, rows = texts(size.choose(12, 9), size.choose(200, 24)), size.choose(32, 8), []
    with trained(size) as path:
        for name, temperature in (("likeliest", 0.0), ("drawn", 0.8)):
            sampling = Sampling(tokens=tokens, temperature=temperature)

            def answered(device: str, batch: int, sampling: Sampling = sampling) -> Any:
                sets = (f"run.device={device}",)
                asked = {"prompts": tuple(prompts), "sampling": sampling, "logprobs": True, "batch": batch}
                return generate(Generation(path=path, set=sets, **asked)).answers

            right, apart = answered("cpu", OTHER), []
            for batch in BATCHES:
                pairs = list(zip(answered(size.device, batch), right, strict=True))
                alike = [(one, other) for one, other in pairs if one.ids == other.ids]
                apart += [_apart(one.model_log_probabilities, other.model_log_probabilities) for one, other in alike]
                rows.append(Row(f"{name}, {batch} at once: answers of the CPU", *_of(len(alike), len(right))))
            rows.append(_near(f"{name}: log-probabilities of their tokens", largest([0.0, *apart])))
    return rows


def scores(size: Size) -> list[Row]:
    """Log-likelihoods in fp32: the CPU's, however many records are computed at once."""
    with trained(size) as path, folder() as one:
        lines = [json.dumps({"text": text}) + "\n" for text in texts(size.choose(60, 17), size.choose(500, 60))]
        (one / "texts.jsonl").write_text("".join(lines), encoding="utf-8")

        def scored(device: str, batch: int) -> list[float]:
            out = one / f"{device}-{batch}.jsonl"
            infer(path, one / "texts.jsonl", out, set={"run.device": device}, batch=batch)
            return [json.loads(line)["log_likelihood"] for line in out.read_text(encoding="utf-8").splitlines()]

        right, found = scored("cpu", OTHER), {batch: scored(size.device, batch) for batch in BATCHES}
    first = found[BATCHES[0]]
    return [
        *(_near(f"{batch} at once, against the CPU's", _apart(own, right)) for batch, own in found.items()),
        *(_near(f"{batch} at once, against one by one", _apart(found[batch], first)) for batch in BATCHES[1:]),
    ]


def speed(size: Size) -> list[Row]:
    """Likeliest tokens per second in bf16."""
    rates, tokens = {}, size.choose(128, 8)
    with model_in_bf16(size) as made:
        vocabulary = hookspecs.tokenizer(made.job)

        def asked(count: int) -> Iterator[TextRow]:
            for number, text in enumerate(islice(texts(64, size.choose(400, 24)), count)):
                yield TextRow(number, vocabulary.encode(text), Sampling(tokens=tokens, temperature=0.0), vocabulary)

        for batch in (1, 8, 64):
            list(run(made.job, made.model, asked(min(batch, 2)), slots=batch))  # what a first call prepares
            began = time.perf_counter()
            done = list(run(made.job, made.model, asked(batch), slots=batch))
            rates[batch] = sum(len(one.ids) - one.prompt for one in done) / (time.perf_counter() - began)
    ratio = rates[8] / rates[1]
    return [
        *(Row(f"{batch} at once: tokens per second", f"{rate:,.0f}") for batch, rate in rates.items()),
        Row("8 at once / one by one", f"{ratio:.1f}", "≥ 4", size.toy or ratio >= 4),
    ]


def memory(size: Size, group: int) -> list[Row]:
    """Bytes of keys and values of rows that are as long as can be, and the peak meanwhile.

    Args:
        size: of the case.
        group: query heads that share keys and values.
    """
    count, longest = size.choose((64, 1024), (8, 64))
    with model_in_bf16(size, **{"decoder.kv_heads": size.choose(12, 4) // group}) as made:
        job, model = made.job, made.model
        part: Any = model.parts[0]
        attention = part.layers["0"].attention
        formula = 2 * len(part.layers) * attention.kv_heads * attention.head_dim * longest * count * 2
        ids = [1] * (longest - 1)
        forwards, kept = Forwards(job, model), memory_for(job, model, count, longest)
        with generating(model):
            before = _allocated(size)
            if size.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for place in range(count):
                forwards(kept.begin(place, ids, longest))
            for call in kept.advance([[*ids, 1]] * count, count):
                forwards(call)
            held, peak = _allocated(size) - before, _peak(size) - before
        if size.device == "cpu":
            found: Any = kept
            held = sum(one.nbytes for cache in found._caches[0].values() for one in cache._held)
    name = f"{attention.heads} heads, {attention.kv_heads} of keys and values"
    rows = [Row(f"{name}: held / formula", f"{held / formula:.3f}", "≤ 1.1", held <= 1.1 * formula)]
    if size.device == "cuda":
        # Where no fused kernel takes fewer heads of keys and values, a layer's are repeated for the time of its call.
        bar = ("≤ 1.1", peak <= 1.1 * formula) if group == 1 else ("—", True)
        rows.append(Row(f"{name}: peak / formula", f"{peak / formula:.3f}", *bar))
    return rows


@contextmanager
def model_in_bf16(size: Size, **more: Any) -> Iterator[TinyRun]:
    """A model of 110 million weights after a step."""
    values = {**MODEL, **size.choose({}, TOY), **more, "train.evaluate_every": 0, "run.device": size.device}
    with folder() as one:
        yield run_forge((), values, steps=1, folder=one)


def captured(size: Size, model: str) -> list[Row]:
    """What `capture` writes of every module, against plain hooks in the same run: the same bits."""
    with folder() as one:
        values = {"run.device": size.device}
        found = capture_cases.train(str(one), model, [], values, classes=[capture_cases.Hooks])
        tensors, _ = capture_cases.captured(found["run"])
    names = sorted(tensors.keys() - {"sample_ids", "position_ids", "input_ids"})
    same = sum(tensors[name].equal(capture_cases.by_hooks(name, tensors[name]).cpu()) for name in names)
    return [Row(f"{model}: activations of plain hooks", *_of(same, len(names)))]


def steered(size: Size) -> list[Row]:
    """Evaluations that `steer` changes, against the same by a plain hook and by weights set to zero."""

    def losses(plugins: Iterable[str], **config: Any) -> list[float]:
        with folder() as one:
            values = {**config, "run.device": size.device, "run.deterministic": True}
            return list(steer_cases.evaluated(str(one), "decoder", list(plugins), values)["losses"])

    with folder() as one:
        added = losses(["steer"], **steer_cases.settings(one))
    hooked, plain = losses(["Hooked"]), losses([])
    zeroed, by_hand = losses(["steer"], **steer_cases.HEADS), losses(["ByHand"])
    changed = plain not in (added, zeroed)
    return [
        Row("losses with a vector, against a plain hook's", *_equal(added == hooked)),
        _near("losses with two heads left out, against columns of zeros", _apart(zeroed, by_hand)),
        Row("losses without them", "others" if changed else "equal", "others", changed),
    ]


def _of(count: int, total: int) -> tuple[str, str, bool]:
    return f"{count} of {total}", "all", 0 < count == total


def _equal(same: bool) -> tuple[str, str, bool]:
    return "equal" if same else "different", "equal", same


def _near(name: str, apart: float) -> Row:
    return Row(name, f"{apart:.1e}", f"≤ {NEAR:.1e}", apart <= NEAR)


def _apart(found: Iterable[float], right: Iterable[float]) -> float:
    """The largest relative difference; numbers below 1 count as 1."""
    return largest([abs(one - other) / max(abs(other), 1.0) for one, other in zip(found, right, strict=True)])


def _allocated(size: Size) -> int:
    return torch.cuda.memory_allocated() if size.device == "cuda" else 0


def _peak(size: Size) -> int:
    return torch.cuda.max_memory_allocated() if size.device == "cuda" else 0

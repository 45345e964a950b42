"""Multi-token prediction: the paper's equations, documents, what is logged, evaluation, resuming, other starts."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import toys
from forge_train import MASKED, Batch, ConfigError, Job, Model, Plugin, Update, hookimpl
from forge_train.run.records import TIMINGS
from forge_train_plugins.models._mtp.ahead import following
from forge_train_tools.testing import TinyRun, run_forge

DEPTHS, WEIGHT, WORDS, DIM, HEADS = 2, 0.3, 37, 16, 2
ROWS: tuple[tuple[int, ...], ...] = ((9, 4, 3), (16,), (1, 2, 13), (5, 6))
"""Lengths of the documents in each row of 16 tokens; what is missing is padding."""
MODEL = {
    "decoder.vocabulary": WORDS,
    "decoder.dim": DIM,
    "decoder.heads": HEADS,
    "decoder.layers": 2,
    "decoder.hidden": 24,
    "decoder.norm_eps": 1e-6,
    "decoder.std": 0.2,
    "mtp.depths": DEPTHS,
    "mtp.weight": WEIGHT,
    "train.sequence": 16,
    "train.global_batch": 4,
    "train.micro_batch": 2,
    "train.clip_norm": 0.0,
    "train.evaluate_every": 0,
}


def documents() -> list[list[tuple[Tensor, Tensor]]]:
    """Token ids of each document of each row, and whether each token is learned, as in a chat."""
    chance = torch.Generator().manual_seed(7)

    def one(length: int) -> tuple[Tensor, Tensor]:
        return torch.randint(1, WORDS, (length,), generator=chance), torch.rand(length, generator=chance) < 0.8

    return [[one(length) for length in lengths] for lengths in ROWS]


def packed(row: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    ids, labels = torch.zeros(16, dtype=torch.int64), torch.full((16,), MASKED)
    document_ids, position_ids = torch.full((16,), len(row)), torch.zeros(16, dtype=torch.int64)
    start = 0
    for number, (tokens, learned) in enumerate(row):
        stop = start + len(tokens)
        ids[start:stop], document_ids[start:stop] = tokens, number
        labels[start : stop - 1] = tokens[1:].masked_fill(~learned[1:], MASKED)
        position_ids[start:stop] = torch.arange(len(tokens))
        start = stop
    return ids, labels, position_ids, document_ids


class Rows(Plugin):
    """The rows above, two at a time, for ever."""

    api = (1, 0)

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Loaded:
        return Loaded()


class Loaded:
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows = [packed(row) for row in documents()[self.at % 4 : self.at % 4 + 2]]
        self.at += 2
        ids, labels, position_ids, document_ids = (torch.stack(one) for one in zip(*rows, strict=True))
        return Batch(ids, labels, position_ids, document_ids)

    def state_dict(self) -> dict[str, Any]:
        return {"sequences": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["sequences"]

    def skip(self, sequences: int) -> None:
        self.at += sequences


class Gradients(Plugin):
    """Keeps what the first step began with, and its gradients."""

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: Any) -> None:
        self.model, self.found, self.weights = model, dict[str, Tensor](), dict[str, Tensor]()

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        for name, one in self.model.named_parameters():
            self.weights.setdefault(name, one.detach().clone())
            if one.grad is not None:
                self.found.setdefault(name, one.grad.clone())


class Bare(Plugin):
    """A model without a place for a tail."""

    api = (1, 0)

    @hookimpl
    def build_model(self, job: Job) -> Any:
        return toys.Tower(1)


# -- the paper, one document at a time, in plain torch ----------------------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor) -> Tensor:
    """Rotary positions 0, 1, … of `x [tokens, heads, features]`."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * 10_000.0 ** -(torch.arange(half) / half)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    spun = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((spun.real, spun.imag), -1)


def layer(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    """`TRM`: `x [tokens, dim]` of one document."""
    h = rms(x, w[f"{name}.attention_norm.weight"])
    q, k, v = ((h @ w[f"{name}.attention.{one}.weight"].T).unflatten(-1, (HEADS, -1)) for one in "qkv")
    logits = torch.einsum("ihd,jhd->hij", turned(q), turned(k)) / math.sqrt(q.shape[-1])
    logits = logits.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    x = x + torch.einsum("hij,jhd->ihd", logits.softmax(-1), v).flatten(1) @ w[f"{name}.attention.o.weight"].T
    h = rms(x, w[f"{name}.feed_forward_norm.weight"])
    gate, up = (h @ w[f"{name}.feed_forward.{one}.weight"].T for one in ("gate", "up"))
    return x + (F.silu(gate) * up) @ w[f"{name}.feed_forward.down.weight"].T


def paper(w: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor], list[int]]:
    """`L` of the main model, `L_MTP` of each depth (eq. 24, not yet divided by T), and the tokens of each."""
    head = w["head.weight"] if "head.weight" in w else w["embedding.weight"]
    losses, counts = [torch.zeros(()) for _ in range(1 + DEPTHS)], [0] * (1 + DEPTHS)
    for tokens, learned in (one for row in documents() for one in row):
        h = w["embedding.weight"][tokens]
        for index in range(2):
            h = layer(h, w, f"layers.{index}")
        given = h = rms(h, w["norm.weight"])
        for k in range(1 + DEPTHS):
            if len(tokens) - k < 1:
                break
            if k:
                own, length = f"tail.layers.{k - 1}", len(tokens) - k
                embedded = rms(w["embedding.weight"][tokens[k:]], w[f"{own}.embedding_norm.weight"])
                joined = torch.cat((embedded, rms(h[:length], w[f"{own}.hidden_norm.weight"])), -1)
                h = layer(joined @ w[f"{own}.projection.weight"].T, w, f"{own}.layer")  # eq. 21 and 22
                given = rms(h, w[f"{own}.norm.weight"])
            wanted = tokens[1 + k :].masked_fill(~learned[1 + k :], MASKED)
            logits = given[: len(wanted)] @ head.T  # eq. 23
            losses[k] = losses[k] + F.cross_entropy(logits, wanted, ignore_index=MASKED, reduction="sum")
            counts[k] += int((wanted != MASKED).sum())
    return losses[0], losses[1:], counts


def trained(tmp_path: Path, *plugins: Any, name: str = "a", steps: int = 1, **more: Any) -> TinyRun:
    config = {**MODEL, **more.pop("config", {})}
    wanted = [Rows, Gradients, *(plugins or ("mtp",))]
    known = {key: one for key, one in config.items() if "mtp" in wanted or not key.startswith("mtp.")}
    return run_forge(wanted, known, steps=steps, folder=tmp_path, name=name, without=("tokenizer",), **more)


@pytest.mark.parametrize("tied", [False, True])
def test_every_gradient_is_that_of_the_papers_equations(tied: bool, tmp_path: Path) -> None:
    run = trained(tmp_path, config={"decoder.tied": tied})
    kept = run.plugin("gradients")
    weights = {name: one.requires_grad_() for name, one in kept.weights.items()}
    main, further, counts = paper(weights)
    (main / counts[0] + WEIGHT / DEPTHS * sum(further) / counts[0]).backward()  # eq. 25; T is the main loss's
    assert kept.found.keys() == weights.keys()
    for name, weight in weights.items():
        assert weight.grad is not None
        gap = (kept.found[name] - weight.grad).norm() / weight.grad.norm()
        assert gap <= 1e-5, (name, float(gap))
    assert run.losses[0] == pytest.approx(main.item() / counts[0], rel=1e-6)
    for depth, (loss, count) in enumerate(zip(further, counts[1:], strict=True), start=1):
        assert run.metrics[0][f"mtp.loss.{depth}"] == pytest.approx(loss.item() / count, rel=1e-6)


def test_what_follows_stays_in_its_document_and_its_row() -> None:
    ids, labels, position_ids, document_ids = (one[None] for one in packed(documents()[0]))
    batch = Batch(ids, labels, position_ids, document_ids)
    for by in (1, 2):
        after, wanted = following(batch, by)
        for at in range(16):
            inside = at + by < 16 and document_ids[0, at + by] == document_ids[0, at]
            assert wanted[0, at] == (labels[0, at + by] if inside else MASKED)
            if inside:
                assert after[0, at] == ids[0, at + by]
    loose, _ = following(Batch(ids, labels), 3)
    assert loose[0].tolist() == [*ids[0, 3:].tolist(), 0, 0, 0]


@pytest.mark.slow
def test_accuracy_counts_what_would_be_guessed(tmp_path: Path) -> None:
    run = trained(tmp_path, steps=60, config={"adamw.lr": 0.02})
    first, last = run.metrics[0], run.metrics[-1]
    for depth in (1, 2):
        assert first[f"mtp.accuracy.{depth}"] < 0.3
        assert last[f"mtp.accuracy.{depth}"] > 0.9, "learned by heart"
        assert last[f"mtp.loss.{depth}"] < first[f"mtp.loss.{depth}"]


def test_evaluation_is_the_loss_of_the_next_token(tmp_path: Path) -> None:
    values = {"train.evaluate_every": 1, "train.evaluate_batches": 2, "adamw.lr": 1e-12}
    run = trained(tmp_path, config=values)
    (event,) = [event for event in run.events if event["event"] == "evaluation"]
    assert event["loss"] == pytest.approx(run.losses[0], rel=1e-6), "the same rows, and weights that stay"


def test_shared_weights_count_once(tmp_path: Path) -> None:
    run = trained(tmp_path)
    names = {name for name, _ in run.model.named_parameters()}
    assert "embedding.weight" in names
    assert "tail.embedding.weight" not in names
    part = run.model.parts[0]
    assert part.tail.embedding.weight is part.embedding.weight
    squares = sum(one.double().square().sum() for one in run.plugin("gradients").found.values())
    assert run.metrics[0]["grad_norm"] == pytest.approx(float(squares) ** 0.5, rel=1e-5)


def test_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = trained(tmp_path, name="whole", steps=6)
    trained(tmp_path, name="cut", steps=6, stop_at=3)
    again = trained(tmp_path, name="cut", steps=6)

    def steady(run: TinyRun) -> list[dict[str, Any]]:
        return [{key: one for key, one in line.items() if key not in TIMINGS} for line in run.metrics]

    assert steady(again)[-3:] == steady(whole)[-3:]
    assert any("mtp.loss.2" in line for line in steady(again)[-3:])


def test_weights_go_to_a_model_without_and_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forge_train")
    run = trained(tmp_path, name="with")
    start = {"train.init_from": str(run.run)}
    plain = ("decoder",)
    with pytest.raises(ConfigError, match=r"tail\.layers\.0\.embedding_norm\.weight") as refused:
        trained(tmp_path, *plain, name="refused", config=start)
    assert str(refused.value).endswith("To leave them out: -s 'train.init_unexpected=[\"tail.*\"]'")
    bare = trained(tmp_path, *plain, name="bare", config={**start, "train.init_unexpected": ["tail.*"]})
    assert "tail.layers.0.embedding_norm.weight" in caplog.text, "what is left out is said"
    ended = run.model.state_dict()
    begun = bare.plugin("gradients").weights
    assert begun.keys() == {name for name in ended if not name.startswith("tail.")}
    assert all(torch.equal(begun[name], ended[name]) for name in begun)
    with pytest.raises(ConfigError, match=r"To start them anew: -s 'train\.init_missing=\[\"tail\.\*\"\]'$"):
        trained(tmp_path, name="refused too", config={"train.init_from": str(bare.run)})
    more = trained(tmp_path, name="more", config={"train.init_from": str(bare.run), "train.init_missing": ["tail.*"]})
    begun = more.plugin("gradients").weights
    assert all(torch.equal(begun[name], one) for name, one in bare.model.state_dict().items())
    assert begun["tail.layers.0.projection.weight"].std() > 0


def test_what_can_not_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"mtp\.depths: sequences of 16 tokens \(train\.sequence\) are too short for 16 depths"
    ):
        trained(tmp_path, config={"mtp.depths": 16})
    with pytest.raises(ConfigError, match=r"mtp: the model of plugin 'bare' can't have layers after its last"):
        run_forge([Rows, Bare, "mtp"], {"train.sequence": 16}, steps=1, folder=tmp_path, without=("tokenizer",))

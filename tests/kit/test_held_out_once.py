"""Every held-out row counts once, on any number of ranks; what fills up an evaluation counts for nothing."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from forge_train import MASKED, Batch
from forge_train_kit.data.loader import StreamLoader, warn_of_few
from forge_train_kit.data.mixed import Mixture, Part
from forge_train_kit.data.paired import Paired
from forge_train_kit.data.proportions import Recipe
from forge_train_kit.data.rows import Arrays
from forge_train_kit.data.stream import Ordered
from forge_train_kit.data.streamed import StreamedRows
from forge_train_kit.data.tokenizers.byte import ByteTokenizer
from forge_train_kit.model.pooling import POOLING, pair_weights
from forge_train_plugins.tasks._embed import Contrastive
from forge_train_plugins.tasks._reward import Preferences

pytestmark = pytest.mark.unit


class Numbered:
    """Rows that hold their number."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first, self.digest = count, first, str(first)

    def read(self, rows: Any) -> Arrays:
        ids = np.repeat(rows[:, None] + self.first, 4, axis=1)
        return Arrays(ids, ids.copy())

    def where(self, row: int) -> str:
        return str(row)


def stream(kind: str) -> tuple[Any, list[int]]:
    """A held-out stream, and the rows that it has."""
    if kind == "ordered":
        return Ordered(Numbered(7), 3, key="x", fixed=True), [*range(7)]
    if kind == "pairs":
        return Paired(Numbered(10), 3, key="x", fixed=True), [*range(10)]
    parts = [Part("a", Ordered(Numbered(2), 3, key="x", fixed=True))]
    parts.append(Part("b", Ordered(Numbered(9, 100), 3, key="x", fixed=True)))
    recipe = Recipe([(0, {"a": 1.0, "b": 1.0})], 0, {"a": 2, "b": 9})
    return Mixture(parts, recipe, key="x"), [0, 1, *range(100, 109)]


def job(rank: int = 0, ranks: int = 1, **train: Any) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(micro_batch=2, **train)),
        dist=SimpleNamespace(data_rank=rank, data_ranks=ranks, main=rank == 0),
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["ordered", "pairs", "mixture"])
def test_each_row_is_learned_once(kind: str, ranks: int) -> None:
    seen: list[int] = []
    for rank in range(ranks):
        made, _ = stream(kind)
        loader = StreamLoader(made, job(rank, ranks), target="member")
        for batch in (next(loader) for _ in range(12)):
            assert batch.inputs.shape == (2, 4)
            learned = (batch.labels != MASKED).all(1)
            assert torch.equal(learned, (batch.labels != MASKED).any(1))
            seen += batch.inputs[learned][:, 0].tolist()
            if kind != "ordered":
                assert torch.equal(learned, batch.targets["member"] >= 0)
    assert sorted(seen) == stream(kind)[1]


def test_training_has_no_end() -> None:
    loader = StreamLoader(Ordered(Numbered(3), 3, key="x"), job())
    assert all((next(loader).labels != MASKED).all() for _ in range(9))


def pairs(vectors: torch.Tensor, member: list[int]) -> tuple[torch.Tensor, Batch]:
    ids = torch.zeros(len(vectors), 1, dtype=torch.int64)
    targets = {POOLING: torch.ones(len(vectors), 1), "member": torch.tensor(member)}
    return vectors[:, None], Batch(ids, ids, targets=targets)


class Identity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()


@pytest.mark.parametrize("kind", ["embed", "reward"])
def test_padding_is_no_pair_and_no_negative(kind: str) -> None:
    layout = SimpleNamespace(cp=1)
    one: Any = SimpleNamespace(dist=SimpleNamespace(data_ranks=1, data_rank=0, layout=layout))
    task: Any = Contrastive(one, 0.2, 4, lambda: None) if kind == "embed" else Preferences(one, lambda: None)
    torch.manual_seed(0)
    vectors = torch.randn(4, 5 if kind == "embed" else 1)
    few, part = pairs(vectors, [0, 1, 0, 1]), Identity()
    filled = pairs(torch.cat([vectors, vectors]), [0, 1, 0, 1, -1, -1, -1, -1])
    assert task.weight(filled[1]) == task.weight(few[1]) == 2
    torch.testing.assert_close(task.loss(part, *filled), task.loss(part, *few))
    assert pair_weights(filled[1]).tolist() == [1, 1, 0, 0]


class Texts:
    def __init__(self, texts: list[bytes]) -> None:
        self.texts = texts

    def read(self, place: Any) -> Any:
        return iter(self.texts)

    def state(self) -> None:
        return None


@pytest.mark.parametrize("isolate", [False, True])
def test_a_stream_of_held_out_text_ends(isolate: bool) -> None:
    texts = [b"abcdefg", b"hij", b"klmnopqrstuv"]
    rows = StreamedRows(Texts(texts), ByteTokenizer(), 8, isolate=isolate, buffer=2, seed=None, key="x", once=True)
    taken = rows.take(6)
    whole = sum(len(text) + 1 for text in texts)
    assert (taken.labels != MASKED).sum() == whole - (len(texts) if isolate else 1)
    assert (rows.take(2).labels == MASKED).all()
    none = StreamedRows(Texts([]), ByteTokenizer(), 8, isolate=isolate, buffer=2, seed=None, key="x", once=True)
    assert (none.take(2).labels == MASKED).all(), "a rank without a text has nothing to add"


def test_few_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "forge_train")
    asked = {"evaluate_every": 5, "evaluate_batches": 4, "global_batch": 8}
    warn_of_few(32, job(**asked))
    warn_of_few(None, job(**asked))
    warn_of_few(6, job(**{**asked, "evaluate_every": 0}))
    assert not caplog.messages
    warn_of_few(6, job(**asked))
    assert "takes 32 sequences" in caplog.messages[0]
    assert "only 6 sequences are held out" in caplog.messages[0]

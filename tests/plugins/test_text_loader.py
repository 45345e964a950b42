"""The stream of micro-batches: order, resuming, ranks, packing, masks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_train import MASKED, Batch, ConfigError, Loader
from forge_train_kit.data.documents import Documents
from forge_train_kit.data.loader import StreamLoader
from forge_train_kit.data.permutation import permute
from forge_train_kit.data.rows import SplitRows
from forge_train_kit.data.shard import Shard
from forge_train_kit.data.stream import Ordered
from forge_train_plugins.data._text.corpus import Corpus
from forge_train_plugins.data._text.ordered import ordered
from forge_train_plugins.data.text import Text
from text_fakes import job, stream

pytestmark = pytest.mark.unit

LENGTHS = (5, 1, 30, 8, 8, 3, 64, 2, 2, 2, 41)


def shuffled(n: int, epoch: int = 0, seed: int = 0) -> list[int]:
    index = np.arange(n, dtype=np.int64)
    return permute(index, np.full(n, epoch, np.int64), n, seed).tolist()


def shards(lengths: tuple[int, ...], files: int) -> list[Shard]:
    """The documents of `stream`, in so many files."""
    parts = np.array_split(np.asarray(lengths, np.int64), files)
    tokens = np.split(stream(lengths).tokens, np.cumsum([part.sum() for part in parts])[:-1].astype(int))
    return [Shard(Path("x"), ids, np.cumsum(part)) for ids, part in zip(tokens, parts, strict=True)]


def loader(
    seed: int | None = 0, lengths: tuple[int, ...] = LENGTHS, isolate: bool = True, files: int = 1, **options: Any
) -> StreamLoader:
    one = job(**options)
    rows = SplitRows(Documents(shards(lengths, files)), one.config.train.sequence, isolate=isolate)
    return StreamLoader(Ordered(rows, seed, key="text"), one)


def corpus(lengths: tuple[int, ...]) -> Corpus:
    return Corpus("'x'", "key", Path("x"), stream(lengths), stream(lengths))


def take(source: StreamLoader, batches: int) -> torch.Tensor:
    """Inputs, `[batches × micro_batch, sequence]`."""
    return torch.cat([batch.inputs for batch in itertools.islice(source, batches)])


class TestPermutation:
    @pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 1000, 4097, 100_000])
    def test_is_a_bijection(self, n: int) -> None:
        for epoch, seed in ((0, 0), (1, 0), (0, 2**63)):
            assert sorted(shuffled(n, epoch, seed)) == list(range(n))

    @given(n=st.integers(1, 3000), epoch=st.integers(0, 2**40), seed=st.integers(0, 2**64 - 1))
    @settings(max_examples=50, deadline=None)
    def test_is_a_bijection_for_any_size_epoch_and_seed(self, n: int, epoch: int, seed: int) -> None:
        assert sorted(shuffled(n, epoch, seed)) == list(range(n))

    def test_epochs_and_seeds_differ(self) -> None:
        orders = [tuple(shuffled(500, epoch, seed)) for epoch in range(5) for seed in range(5)]
        assert len(set(orders)) == len(orders)

    def test_elements_do_not_depend_on_what_is_asked_together(self) -> None:
        epochs = np.array([3, 0, 3, 7], np.int64)
        index = np.array([10, 10, 99, 0], np.int64)
        together = permute(index, epochs, 100, 5)
        assert together.tolist() == [shuffled(100, int(e), 5)[int(i)] for e, i in zip(epochs, index, strict=True)]

    def test_looks_random(self) -> None:
        n, runs = 300, 200
        orders = np.array([shuffled(n, epoch) for epoch in range(runs)])
        fixed = (orders == np.arange(n)).sum(axis=1).mean()
        followed = (np.diff(orders, axis=1) == 1).sum(axis=1).mean()
        assert 0.7 < fixed < 1.3, "a random permutation has one fixed point on average"
        assert 0.7 < followed < 1.3, "and one neighbour that stays a neighbour"
        columns = orders.mean(axis=0)
        assert abs(columns - (n - 1) / 2).max() < 5 * (n / 12**0.5) / runs**0.5

    def test_reaches_beyond_32_bits(self) -> None:
        n = 2**45 + 12345
        index = np.arange(n - 1000, n, dtype=np.int64)
        values = permute(index, np.zeros_like(index), n, 1)
        assert len(set(values.tolist())) == 1000
        assert 0 <= values.min() <= values.max() < n
        assert values.max() > 2**40


class TestOrder:
    def test_is_a_loader(self) -> None:
        assert isinstance(loader(), Loader)

    def test_every_epoch_has_every_row_once(self) -> None:
        source = loader(micro_batch=1)
        n = sum(LENGTHS) // 8
        epochs = [take(source, n)[:, 0].tolist() for _ in range(3)]
        assert all(sorted(epoch) == [8 * row for row in range(n)] for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]

    def test_without_shuffle_the_stream_is_read_in_order(self) -> None:
        source = loader(seed=None, micro_batch=3)
        expected = [8 * (index % (sum(LENGTHS) // 8)) for index in range(60)]
        assert take(source, 20)[:, 0].tolist() == expected

    def test_seeds_differ(self) -> None:
        assert not torch.equal(take(loader(seed=1), 10), take(loader(seed=2), 10))

    @pytest.mark.slow
    @given(
        ranks=st.integers(1, 5), micro_batch=st.integers(1, 5), start=st.integers(0, 70), new_ranks=st.integers(1, 5),
        new_micro_batch=st.integers(1, 5),
    )  # fmt: skip
    @settings(max_examples=40, deadline=None)
    def test_ranks_share_one_stream_and_resume_it_in_any_layout(
        self, ranks: int, micro_batch: int, start: int, new_ranks: int, new_micro_batch: int
    ) -> None:
        single = take(loader(micro_batch=1), 300)

        def union(
            ranks: int, micro_batch: int, state: dict[str, Any], steps: int
        ) -> tuple[torch.Tensor, dict[str, Any]]:
            sources = [loader(micro_batch=micro_batch, rank=rank, ranks=ranks) for rank in range(ranks)]
            for source in sources:
                source.load_state_dict(state)
            rows = torch.cat([next(source).inputs for _ in range(steps) for source in sources])
            states = [source.state_dict() for source in sources]
            assert all(other == states[0] for other in states)
            return rows, states[0]

        first, state = union(ranks, micro_batch, {"sequences": start}, 3)
        assert state["sequences"] == start + 3 * ranks * micro_batch
        second, _ = union(new_ranks, new_micro_batch, state, 3)
        rows = torch.cat([first, second])
        assert torch.equal(rows, single[start : start + len(rows)])

    def test_resume_repeats_batch_for_batch(self) -> None:
        source = loader()
        take(source, 37)
        state = source.state_dict()
        resumed = loader()
        resumed.load_state_dict(state)
        for left, right in zip(itertools.islice(source, 20), itertools.islice(resumed, 20), strict=True):
            assert all(torch.equal(getattr(left, f), getattr(right, f)) for f in ("inputs", "labels", "document_ids"))

    def test_skip_moves_the_global_stream(self) -> None:
        single = take(loader(micro_batch=1), 50)
        source = loader(micro_batch=2, rank=1, ranks=2)
        next(source)
        source.skip(5)
        assert torch.equal(next(source).inputs, single[11:13])
        source.skip(-13)
        assert source.state_dict()["sequences"] == 0
        with pytest.raises(ValueError, match="no position -1"):
            source.skip(-1)

    def test_a_plan_boundary_is_no_boundary_of_the_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = take(loader(micro_batch=3), 30)
        monkeypatch.setattr("forge_train_kit.data.loader._AHEAD", 7)
        assert torch.equal(take(loader(micro_batch=3), 30), expected)

    def test_a_state_of_another_corpus_is_refused(self) -> None:
        source = loader()
        with pytest.raises(ConfigError, match="the corpus is not the one"):
            source.load_state_dict({"sequences": 4, "corpus": "b"})


def oracle(lengths: tuple[int, ...], sequence: int, row: int, isolate: bool) -> tuple[list[int], ...]:
    """Inputs, labels, positions and documents of a row, token by token."""
    owner = [number for number, length in enumerate(lengths) for _ in range(length)]
    labels, position_ids, document_ids = [], [], []
    places = range(row * sequence, (row + 1) * sequence)
    for place in places:
        last = place + 1 == len(owner)
        labels.append(MASKED if last or (isolate and owner[place + 1] != owner[place]) else place + 1)
        begin = max(places[0], owner.index(owner[place]))
        position_ids.append(place - begin)
        document_ids.append(owner[place] - owner[places[0]])
    return list(places), labels, position_ids, document_ids


class TestRows:
    @given(
        lengths=st.lists(st.integers(1, 20), min_size=4, max_size=20).map(tuple),
        sequence=st.integers(1, 17),
        files=st.integers(1, 4),
    )
    @settings(max_examples=60, deadline=None)
    def test_agree_with_a_token_by_token_oracle(self, lengths: tuple[int, ...], sequence: int, files: int) -> None:
        if sum(lengths) < sequence:
            return
        for isolate in (True, False):
            source = loader(None, lengths, sequence=sequence, micro_batch=3, isolate=isolate, files=files)
            rows = itertools.cycle(range(sum(lengths) // sequence))
            for batch in itertools.islice(source, 8):
                for r in range(3):
                    inputs, labels, position_ids, document_ids = oracle(lengths, sequence, next(rows), isolate)
                    assert batch.inputs[r].tolist() == inputs
                    assert batch.labels[r].tolist() == labels
                    if isolate:
                        assert batch.position_ids is not None
                        assert batch.document_ids is not None
                        assert batch.position_ids[r].tolist() == position_ids
                        assert batch.document_ids[r].tolist() == document_ids

    def test_shapes_and_types(self) -> None:
        batch = next(loader(sequence=8, micro_batch=5))
        for tensor in (batch.inputs, batch.labels, batch.position_ids, batch.document_ids):
            assert tensor is not None
            assert tensor.shape == (5, 8)
            assert tensor.dtype == torch.int64
            assert tensor.is_contiguous()

    def test_without_isolation_documents_run_on(self) -> None:
        batch: Batch = next(loader(None, isolate=False))
        assert batch.document_ids is None
        assert batch.position_ids is None
        assert (batch.labels == batch.inputs + 1).all()

    def test_batches_share_no_memory(self) -> None:
        source = loader(None, (100,), micro_batch=1)
        first, second = next(source), next(source)
        assert first.position_ids is not None
        first.position_ids.fill_(-1)
        assert second.position_ids is not None
        assert second.position_ids.tolist() == [list(range(8))]

    def test_too_little_text_is_said_with_both_numbers(self) -> None:
        for side, word in (("train", "training"), ("validation", "held-out")):
            with pytest.raises(ConfigError, match=rf"the {word} part of 'x' has 7 tokens, and one sequence takes 8"):
                ordered(corpus((7,)), side, job(), shuffle=True, isolate=True)

    def test_one_sequence_is_enough(self) -> None:
        source = StreamLoader(ordered(corpus((8,)), "train", job(), shuffle=True, isolate=True), job())
        assert next(source).labels.tolist() == [[1, 2, 3, 4, 5, 6, 7, MASKED]] * 2

    def test_validation_is_the_same_in_every_epoch_and_for_every_seed(self) -> None:
        def rows(seed: int) -> list[int]:
            one = job(micro_batch=1, seed=seed)
            source = StreamLoader(ordered(corpus(LENGTHS), "validation", one, shuffle=True, isolate=True), one)
            return take(source, 2 * (sum(LENGTHS) // 8))[:, 0].tolist()

        first = rows(0)
        half = len(first) // 2
        assert first[:half] == first[half:]
        assert first == rows(1)
        assert first[:half] != sorted(first[:half])


@pytest.mark.parametrize("isolate", [True, False])
def test_the_example_looks_like_what_the_loader_gives(isolate: bool) -> None:
    def look(batch: Batch) -> dict[str, Any]:
        tensors = {name: getattr(batch, name) for name in ("inputs", "labels", "position_ids", "document_ids")}
        return {name: None if tensor is None else (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    example = Text(Text.Config(isolate=isolate)).example_batch(job(micro_batch=3))
    assert look(example) == look(next(loader(isolate=isolate, micro_batch=3)))

"""Every document exactly once an epoch, on any number of ranks, resumed twice; rows and mixtures against an oracle."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossed import few
from forge_train import MASKED, Batch, ConfigError, Loader
from forge_train_kit.data.documents import Documents
from forge_train_kit.data.fit import fitted
from forge_train_kit.data.loader import StreamLoader
from forge_train_kit.data.mixed import Mixture, Part
from forge_train_kit.data.plugin import Prefetch
from forge_train_kit.data.prepare import Preparation, Report, prepare, tasks
from forge_train_kit.data.proportions import Recipe
from forge_train_kit.data.random_tokens import RandomTokens
from forge_train_kit.data.rows import PackedRows
from forge_train_kit.data.shard import Shard
from forge_train_kit.data.stream import Ordered
from forge_train_kit.data.tokenizers.byte import ByteTokenizer
from forge_train_kit.data.tokens import rows_of
from forge_train_kit.kernels import needs_of

pytestmark = pytest.mark.unit

SEQUENCE = 12
PAD = 9999


def job(rank: int = 0, ranks: int = 1, micro_batch: int = 2, seed: int = 0, sequence: int = SEQUENCE) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(
        hooks=SimpleNamespace(call=lambda spec, arguments: [] if spec.name == "modalities" else ByteTokenizer()),
        config=SimpleNamespace(train=SimpleNamespace(sequence=sequence, micro_batch=micro_batch, evaluate_every=0)),
        dist=SimpleNamespace(data_rank=rank, data_ranks=ranks),
        device=torch.device("cpu"),
        seed=seed,
    )


def corpus(lengths: list[int], first: int = 0, *, trained: bool = False, files: int = 3) -> Documents:
    """Documents whose tokens count up from `first`, in several shards; every third token is not to be learned."""
    ends = np.cumsum([0, *lengths])
    ids = np.arange(first, first + ends[-1], dtype=np.int64)
    shards = []
    for part in np.array_split(np.arange(len(lengths)), files):
        if len(part):
            here = slice(ends[part[0]], ends[part[-1] + 1])
            mask = (ids[here] % 3 != 0).astype(np.uint8) if trained else None
            shards.append(Shard(Path("x"), ids[here], ends[part + 1] - ends[part[0]], mask))
    return Documents(shards)


LENGTHS = [5, 1, 30, 8, 8, 3, 64, 2, 2, 2, 41, 12, 7, 11, 1, 1, 6]
Make = Callable[..., StreamLoader]
PACKINGS = ("split", "best_fit", "pad", "buckets")
INLINE = Prefetch()
WORKERS = {
    "inline": INLINE,
    **{f"{count} threads": Prefetch(workers=count) for count in (1, 3)},
    "3 processes": Prefetch(workers=3, kind="processes"),
}


def single(packing: str) -> Make:
    def make(prefetch: Prefetch = INLINE, **options: Any) -> StreamLoader:
        rows = rows_of(corpus(LENGTHS), SEQUENCE, packing=packing, isolate=True, pad=PAD)
        return StreamLoader(Ordered(rows, 3, key="x"), job(**options), prefetch)

    return make


def mixed(packing: str) -> Make:
    def make(prefetch: Prefetch = INLINE, **options: Any) -> StreamLoader:
        texts = {"a": corpus(LENGTHS), "b": corpus([7] * 30, 1000), "c": corpus([12, 40], 2000)}
        rows = {name: rows_of(text, SEQUENCE, packing=packing, isolate=True, pad=PAD) for name, text in texts.items()}
        parts = [Part(name, Ordered(one, 3, key="x")) for name, one in rows.items()]
        recipe = Recipe([(0, {"a": 3, "b": 1, "c": 1}), (40, {"a": 1, "b": 1, "c": 0})], 0)
        return StreamLoader(Mixture(parts, recipe, key="x"), job(**options), prefetch)

    return make


def random_tokens(length: int = 9, isolate: bool = True) -> RandomTokens:
    return RandomTokens(SEQUENCE, 50, length, seed=3, isolate=isolate, key="x")


STREAMS = {
    **{packing: single(packing) for packing in PACKINGS},
    "mixture": mixed("best_fit"),
    "mixed buckets": mixed("buckets"),
    "random": lambda prefetch=INLINE, **options: StreamLoader(random_tokens(), job(**options), prefetch),
}


def taken(loaders: list[StreamLoader], batches: int) -> list[Any]:
    """What all ranks together are given: rows of every tensor, in global order."""
    found = []
    for _ in range(batches):
        for loader in loaders:
            batch = next(loader)
            found += [
                tuple(tensor[row].tolist() for tensor in batch.tensors().values()) for row in range(len(batch.inputs))
            ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workers"),
    few(
        [*itertools.product(STREAMS, WORKERS)],
        [(name, way) for name in STREAMS for way in WORKERS if "processes" not in way or name == "mixture"],
    ),
)
def test_one_global_sequence_on_any_ranks_resumed_twice(name: str, workers: str) -> None:
    make, prefetch = STREAMS[name], WORKERS[workers]
    assert isinstance(make(), Loader)
    expected = taken([make(micro_batch=1)], 96)
    for ranks, micro_batch in ((1, 3), (2, 1), (3, 2)):
        micro_batch = 1 if "buckets" in name else micro_batch
        size = ranks * micro_batch
        ways = [prefetch, *[WORKERS["3 threads"] if workers == "3 processes" else prefetch] * 2]  # processes cost time
        every = [make(ways[rank], rank=rank, ranks=ranks, micro_batch=micro_batch) for rank in range(ranks)]
        first = taken(every, 12 // size)
        state = json.loads(json.dumps(every[-1].state_dict()))
        assert state["sequences"] == 12
        other = [make(ways[-1], rank=rank, ranks=2, micro_batch=1) for rank in range(2)]
        for loader in other:
            loader.load_state_dict(state)
        second = taken(other, 12)
        again = json.loads(json.dumps(other[0].state_dict()))
        for loader in every:
            loader.load_state_dict(again)
        third = taken(every, 60 // size)
        for loader in (*every, *other):
            loader.close()
        assert first + second + third == expected


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_token_once_an_epoch(packing: str, ranks: int, workers: int) -> None:
    documents = corpus(LENGTHS)
    rows = rows_of(documents, SEQUENCE, packing=packing, isolate=True, pad=PAD)
    loaders = [
        StreamLoader(Ordered(rows, 3, key="x"), job(rank, ranks, micro_batch=1), Prefetch(workers=workers))
        for rank in range(ranks)
    ]
    given = (next(loaders[number % ranks]) for number in itertools.count())
    for _ in range(3):
        seen: Counter[int] = Counter()
        for batch in itertools.islice(given, rows.count):
            assert batch.inputs.numel() <= SEQUENCE
            seen.update(batch.inputs.ravel().tolist())
        padding = seen.pop(PAD, 0)
        used = rows.count * SEQUENCE if packing == "split" else documents.tokens
        assert seen == Counter(range(used))
        if packing != "buckets":
            assert padding == rows.count * SEQUENCE - used
    for loader in loaders:
        loader.close()


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    sequence=st.sampled_from([7, 12, 32, 96]),
    trained=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_buckets_agree_with_an_oracle(lengths: list[int], sequence: int, trained: bool) -> None:
    """A bucket's rows are pieces of like length, padded on the right, and all together hold at most `sequence`."""
    if trained:
        lengths = [min(length, sequence) for length in lengths]
    rows = rows_of(corpus(lengths, trained=trained), sequence, packing="buckets", isolate=True, pad=PAD)
    ends, seen = set(np.cumsum(lengths).tolist()), Counter[int]()
    unit = math.gcd(sequence, 64)
    for number in range(rows.count):
        found = rows.read(np.array([number]))
        assert found.position_ids is None
        assert found.document_ids is None
        assert found.inputs.size <= sequence
        assert found.inputs.shape[1] % unit == 0
        longest = 0
        for inputs, labels in zip(found.inputs.tolist(), found.labels.tolist(), strict=True):
            tokens = [token for token in inputs if token != PAD]
            longest = max(longest, len(tokens))
            assert inputs == tokens + [PAD] * (len(inputs) - len(tokens)), "padding is on the right"
            assert tokens == list(range(tokens[0], tokens[0] + len(tokens))), "a row is one stretch of one document"
            assert not ends & set(tokens[1:])
            for token, label in itertools.zip_longest(tokens, labels, fillvalue=PAD):
                learned = token != PAD and token + 1 not in ends and not (trained and (token + 1) % 3 == 0)
                assert label == (token + 1 if learned else MASKED)
            seen.update(tokens)
        assert found.inputs.shape[1] - longest < unit
    assert seen == Counter(range(sum(lengths)))


def test_buckets_of_many_documents_are_equal_work() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(int).clip(1, 4000).tolist()
    rows = rows_of(corpus(lengths), 8192, packing="buckets", isolate=True, pad=PAD)
    sizes = np.array([rows.read(np.array([number])).inputs.size for number in range(rows.count)])
    assert sizes.max() <= 8192
    assert np.mean(sizes) > 0.95 * 8192
    assert sum(lengths) / sizes.sum() > 0.85, "of the tokens of all batches, padding included"


def test_random_tokens_are_one_text_in_rows() -> None:
    whole = random_tokens(isolate=False).read(np.arange(4000))
    ids = whole.inputs.ravel()
    assert whole.labels.ravel()[:-1].tolist() == ids[1:].tolist()
    counts = np.bincount(ids, minlength=50)
    assert len(counts) == 50
    assert abs(counts / len(ids) * 50 - 1).max() < 0.2
    apart = random_tokens().read(np.arange(4000))
    ends = np.flatnonzero(apart.labels.ravel() == MASKED) + 1
    assert 8.5 < len(ids) / len(ends) < 9.5
    text = Documents([Shard(Path("x"), ids, np.append(ends, len(ids)) if ends[-1] < len(ids) else ends)])
    rows = rows_of(text, SEQUENCE, packing="split", isolate=True, pad=PAD).read(np.arange(3999))
    for name in ("inputs", "labels", "position_ids", "document_ids"):
        assert (getattr(apart, name)[:3999] == getattr(rows, name)).all(), name
    assert random_tokens(1).read(np.arange(9)).labels.tolist() == np.full((9, SEQUENCE), MASKED).tolist()
    with pytest.raises(ConfigError, match="not the tokens"):
        random_tokens(8).load_state_dict(random_tokens().state_dict(0), 0)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=15),
    packing=st.sampled_from(["best_fit", "pad"]),
    trained=st.booleans(),
    files=st.integers(1, 4),
)
@settings(max_examples=80, deadline=None)
def test_packed_rows_agree_with_an_oracle(lengths: list[int], packing: str, trained: bool, files: int) -> None:
    """Each token has its document's next token as label, its place in its piece, and one number for its piece."""
    if trained:  # conversations, which are never cut
        lengths = [min(length, SEQUENCE) for length in lengths]
    documents = corpus(lengths, trained=trained, files=files)
    rows = rows_of(documents, SEQUENCE, packing=packing, isolate=True, pad=PAD)
    ends = set(np.cumsum(lengths).tolist())
    starts = {0, *ends}
    found = rows.read(np.arange(rows.count))
    assert found.position_ids is not None
    assert found.document_ids is not None
    for inputs, labels, positions, numbers in zip(
        *(one.tolist() for one in (found.inputs, found.labels, found.position_ids, found.document_ids)), strict=True
    ):
        for at, token in enumerate(inputs):
            new = at == 0 or numbers[at] != numbers[at - 1]
            assert positions[at] == (0 if new else positions[at - 1] + 1)
            if token == PAD:
                assert labels[at] == MASKED
                assert at == 0 or inputs[at - 1] != PAD or numbers[at] == numbers[at - 1]
                continue
            if not new:
                assert token == inputs[at - 1] + 1, "a piece is one stretch of one document"
            cut = (token - max(start for start in starts if start <= token)) % SEQUENCE == 0
            assert new == cut, "a piece begins where a document does, or where a long one is cut"
            learned = token + 1 not in ends and (not trained or (token + 1) % 3 != 0)
            assert labels[at] == (token + 1 if learned else MASKED)


def test_prepared_conversations_are_not_cut() -> None:
    for packing, message in (
        ("split", "'split' would cut conversations"),
        ("pad", "2 of 3 .* are longer than a row of 12"),
    ):
        with pytest.raises(ConfigError, match=message):
            rows_of(corpus([5, 13, 20], trained=True), SEQUENCE, packing=packing, isolate=True, pad=PAD)


def conversations(lengths: list[int], long: Any) -> list[list[int]]:
    documents = corpus(lengths)
    pieces = fitted(documents, SEQUENCE, long=long, packing="best_fit", key="sft")
    found = PackedRows(documents, SEQUENCE, pieces, pad=PAD).read(np.arange(len(pieces.row_ends)))
    assert found.document_ids is not None
    split = []
    for inputs, numbers in zip(found.inputs.tolist(), found.document_ids.tolist(), strict=True):
        for number in range(numbers[-1] + 1):
            piece = [token for token, one in zip(inputs, numbers, strict=True) if one == number and token != PAD]
            split += [piece] if piece else []
    return sorted(split)


def test_conversations_are_not_cut_but_by_a_stated_policy() -> None:
    lengths = [5, 12, 20, 3]
    whole = [list(range(5)), list(range(5, 17)), list(range(37, 40))]
    assert conversations(lengths, "drop") == whole
    assert conversations(lengths, "right") == sorted([*whole, list(range(17, 29))])
    assert conversations(lengths, "left") == sorted([*whole, list(range(25, 37))])
    with pytest.raises(ConfigError, match=r"1 of 4 texts are longer than a row of 12 tokens, .* has 20"):
        conversations(lengths, "refuse")


class TestMixture:
    @staticmethod
    def make(
        phases: list[Any],
        lengths: dict[str, list[int]] | None = None,
        caps: dict[str, int] | None = None,
        samples: int | None = None,
        **options: Any,
    ) -> StreamLoader:
        texts = lengths or {"a": LENGTHS, "b": [7] * 30, "new": [12, 40]}
        names = dict.fromkeys(name for _, weights in phases for name in weights)
        parts = [
            Part(
                name,
                Ordered(
                    rows_of(corpus(texts[name], 1000 * at), SEQUENCE, packing="split", isolate=True, pad=PAD),
                    5,
                    key="mixture",
                ),
            )
            for at, name in enumerate(names)
        ]
        return StreamLoader(
            Mixture(parts, Recipe(phases, 0, caps or {}, samples), key="mixture"), job(micro_batch=1, **options)
        )

    def test_proportions_hold(self) -> None:
        loader = self.make([(0, {"a": 3, "b": 1})])
        sources = [int(next(loader).inputs[0, 0]) // 1000 for _ in range(400)]
        for start in range(0, 360, 7):
            assert abs(sum(sources[start : start + 40]) - 10) <= 2
        assert loader.state_dict()["given"] == {"a": 300, "b": 100}

    def test_a_source_goes_on_where_it_was_under_other_weights(self) -> None:
        before = self.make([(0, {"a": 3, "b": 1})])
        old = [tuple(next(before).inputs[0].tolist()) for _ in range(20)]
        state = json.loads(json.dumps(before.state_dict()))
        after = self.make([(0, {"a": 1, "b": 1, "new": 1})])
        after.load_state_dict(state)
        rows = [tuple(next(after).inputs[0].tolist()) for _ in range(30)]
        alone = self.make([(0, {"a": 1})])
        expected = [tuple(next(alone).inputs[0].tolist()) for _ in range(60)]
        mine = [row for row in old + rows if row[0] < 1000]
        assert mine == expected[: len(mine)]
        assert sum(row[0] >= 2000 for row in rows) in (9, 10, 11)
        assert after.state_dict()["given"]["a"] == len(mine)

    @pytest.mark.slow
    @given(st.integers(0, 60), st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
    @settings(deadline=None, max_examples=30)
    def test_caps_count_what_was_really_given(self, first: int, more: int, weight: int, other: int) -> None:
        """Re-weighted at a resume: a source stops exactly at its cap, and the new order is resumed exactly, too."""
        old = self.make([(0, {"a": 9, "b": 1})], caps={"a": 60})
        seen = [int(next(old).inputs[0, 0]) // 1000 for _ in range(first)]
        weights = [(0, {"a": weight, "b": other}), (90, {"a": 1, "b": 1})]
        changed = self.make(weights, caps={"a": 60})
        changed.load_state_dict(json.loads(json.dumps(old.state_dict())))
        seen += [int(next(changed).inputs[0, 0]) // 1000 for _ in range(more)]
        again = self.make(weights, caps={"a": 60})
        again.load_state_dict(json.loads(json.dumps(changed.state_dict())))
        for _ in range(300):
            row = next(changed).inputs
            assert torch.equal(row, next(again).inputs)
            seen.append(int(row[0, 0]) // 1000)
        assert changed.state_dict() == again.state_dict()
        assert changed.state_dict()["given"] == {"a": seen.count(0), "b": seen.count(1)}
        assert seen.count(0) == 60

    def test_a_mixture_that_ends_too_soon_is_told_by_what_was_given(self) -> None:
        old = self.make([(0, {"a": 1, "b": 1})], caps={"a": 30, "b": 30}, samples=60)
        for _ in range(40):
            next(old)
        state = json.loads(json.dumps(old.state_dict()))
        fits = self.make([(0, {"a": 3, "b": 1})], caps={"a": 30, "b": 30}, samples=60)
        fits.load_state_dict(state)
        assert len([next(fits) for _ in range(20)]) == 20
        short = self.make([(0, {"a": 1, "b": 1})], caps={"a": 30, "b": 25}, samples=60)
        short.load_state_dict(state)
        with pytest.raises(ConfigError, match="used up to their `epochs` after 55 sequences, and the run takes 60"):
            next(short)

    def test_another_source_of_the_same_name_is_refused(self) -> None:
        state = self.make([(0, {"a": 1, "b": 1})]).state_dict()
        other = self.make([(0, {"a": 1, "b": 1})], {"a": [30, 30], "b": [7] * 30})
        with pytest.raises(ConfigError, match="'a' is not what this state was saved with"):
            other.load_state_dict(state)


class TestPlugins:
    @pytest.fixture
    def folders(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        monkeypatch.setattr(tasks, "TASK", 500)
        made = []
        for name in ("web", "code"):
            texts = tmp_path / f"{name}.jsonl"
            lines = [json.dumps({"text": f"{name} {number} " * (1 + number % 5)}) for number in range(60)]
            texts.write_text("\n".join(lines))
            prepare(Preparation((str(texts),), tmp_path / name, held_out=0.2), Report())
            made.append(tmp_path / name)
        return made

    @staticmethod
    def texts(batches: list[Batch]) -> Counter[bytes]:
        """The whole documents that rows hold."""
        found: Counter[bytes] = Counter()
        for batch in batches:
            assert batch.document_ids is not None
            for ids, numbers in zip(batch.inputs.tolist(), batch.document_ids.tolist(), strict=True):
                for number in set(numbers):
                    piece = [id for id, one in zip(ids, numbers, strict=True) if one == number]
                    if len(piece) > 1 and piece.count(256) == 1 and piece[-1] == 256:
                        found[bytes(piece[:-1])] += 1
        return found

    @pytest.mark.parametrize("packing", ["best_fit", "pad"])
    def test_tokens(self, folders: list[Path], packing: str) -> None:
        from forge_train_plugins.data.tokens import Tokens

        assert Tokens.implied_values(Tokens.Config(path=str(folders[0]))) == {"tokenizer.path": "bytes"}
        plugin = Tokens(Tokens.Config(path=str(folders[0]), packing=packing))  # type: ignore[arg-type]
        both: Counter[bytes] = Counter()
        for side in ("train", "validation"):
            loader = plugin.build_data(job(micro_batch=1, sequence=64), side)  # type: ignore[arg-type]
            count = loader._stream.rows.count  # type: ignore[attr-defined]
            both += self.texts([next(loader) for _ in range(count)])
        assert both == Counter(f"web {number} ".encode() * (1 + number % 5) for number in range(60))

    def test_mixture_opens_several_folders(self, folders: list[Path]) -> None:
        from forge_train_plugins.data.mixture import Mixture as Plugin
        from forge_train_plugins.data.mixture import Source

        sources = tuple(Source(path=str(folder), weight=weight) for folder, weight in zip(folders, (3, 1), strict=True))
        plugin = Plugin(Plugin.Config(sources=sources, packing="best_fit"))
        one = job(micro_batch=1, sequence=64)
        one.config.train.total_steps, one.config.train.batch_at = 10, lambda step: 2
        loader = plugin.build_data(one, "train")
        found = [bytes(id for id in next(loader).inputs[0].tolist() if id < 256)[:3] for _ in range(40)]
        assert Counter(found) == {b"web": 30, b"cod": 10}
        held_out = [
            next(Plugin(Plugin.Config(sources=sources)).build_data(job(seed=seed, sequence=8), "validation")).inputs
            for seed in range(6)
        ]
        assert all(torch.equal(held_out[0], other) for other in held_out), "every run is evaluated on the same text"
        capped = Plugin(Plugin.Config(sources=tuple(replace(source, epochs=0.1) for source in sources)))
        with pytest.raises(ConfigError, match="all are used up to their `epochs` after"):
            next(capped.build_data(one, "train"))

    def test_paths_in_a_file_begin_where_the_file_lies(self, folders: list[Path], tmp_path: Path) -> None:
        from forge_train_tools.configuration.request import Request
        from forge_train_tools.configuration.setup import resolve

        file = tmp_path / "run.toml"
        file.write_text(
            'plugins = ["mixture"]\n[mixture]\nsources = [{ path = "web" }, { path = "code", name = "c" }]\n'
        )
        setup = resolve(Request(str(file), set=("train.steps=2",)))
        found = [source.path for source in setup.config.sections["mixture"].sources]
        assert found == [str(folder) for folder in folders]
        assert setup.config.sections["tokenizer"].path == "bytes"
        assert str(setup.config.origin(("tokenizer", "path"))) == "plugin mixture"

    @pytest.mark.parametrize("plugin", ["tokens", "mixture"])
    def test_a_bucket_is_a_micro_batch(self, folders: list[Path], plugin: str) -> None:
        from forge_train_tools.configuration.request import Request
        from forge_train_tools.configuration.setup import resolve

        source = f"tokens.path={folders[0]}" if plugin == "tokens" else f'mixture.sources=[{{ path = "{folders[0]}" }}]'
        wanted = (source, f"{plugin}.packing=buckets", "train.steps=2", "train.sequence=64", "train.global_batch=4")
        setup = resolve(Request(plugins=(plugin,), set=wanted))
        assert setup.config.train.micro_batch == 1
        assert not any(need.documents for _, need in needs_of(setup.hooks, setup.config))
        with pytest.raises(ConfigError, match="train.micro_batch: must be 1 with packing 'buckets'"):
            resolve(Request(plugins=(plugin,), set=(*wanted, "train.micro_batch=2")))

    def test_bits_per_byte_of_a_prepared_folder(self, folders: list[Path]) -> None:
        """As many tokens are predicted as there are bytes: every byte, and the end, but a document's first one."""
        from forge_train_kit.data.tokens import tokens_per_byte

        assert tokens_per_byte(folders[0], isolate=True) == 1.0
        assert tokens_per_byte(folders[0].parent, isolate=True) is None

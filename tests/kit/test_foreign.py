"""Files of other programs, written here byte by byte after the programs' own descriptions."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_train.base.errors import ConfigError
from forge_train_kit.data import foreign
from forge_train_kit.data.foreign import ends_of, largest, open_foreign
from forge_train_kit.data.shard import Shard

pytestmark = [pytest.mark.unit]

LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}
"""Megatron's code → how struct writes the dtype."""
DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [[7, 8, 9, 10]]]
"""Documents of sequences."""


def megatron(prefix: Path, documents: list[list[list[int]]] = DOCUMENTS, code: int = 8, modes: bool = False) -> Path:
    """Writes `.bin` and `.idx` as Megatron's IndexedDatasetBuilder does."""
    sequences = [sequence for document in documents for sequence in document]
    letter, pointer = LETTERS[code], 0
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1)
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    for sequence in sequences:
        index += struct.pack("<q", pointer)
        pointer += len(sequence) * struct.calcsize(letter)
    border = 0
    index += struct.pack("<q", border)
    for document in documents:
        border += len(document)
        index += struct.pack("<q", border)
    index += b"\0" * len(sequences) if modes else b""
    tokens = [token for sequence in sequences for token in sequence]
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(tokens)}{letter}", *tokens))
    prefix.with_suffix(".idx").write_bytes(index)
    return prefix.with_suffix(".idx")


def llm_c(path: Path, tokens: list[int], magic: int = 20240520, version: int = 1, count: int | None = None) -> Path:
    letter = "I" if magic == 20240801 else "H"
    header = struct.pack("<3i", magic, version, len(tokens) if count is None else count)
    path.write_bytes(header.ljust(1024, b"\0") + struct.pack(f"<{len(tokens)}{letter}", *tokens))
    return path


def npy(path: Path, description: str, shape: str, data: bytes) -> Path:
    header = f"{{'descr': '{description}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header = header.ljust(117) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data)
    return path


def only(path: Path, dtype: str | None = None, end: int | None = None) -> Shard:
    [shard] = open_foreign(path, dtype=dtype, end=end, key="tokens.")
    return shard


def texts(shard: Shard) -> list[list[int]]:
    assert shard.ends.dtype == np.int64
    assert shard.ends[-1] == len(shard.tokens)
    return [part.tolist() for part in np.split(shard.tokens, shard.ends[:-1])]


def refused(told: str, path: Path, **stated: str | int) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        open_foreign(path, **{"dtype": None, "end": None, "key": "tokens.", **stated})
    assert "\n" not in str(caught.value)


class TestMegatron:
    @pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
    @pytest.mark.parametrize("suffix", [".bin", ".idx", ""])
    def test_documents_of_the_index(self, tmp_path: Path, code: int, suffix: str) -> None:
        megatron(tmp_path / "corpus", code=code)
        shard = only(tmp_path / f"corpus{suffix}")
        assert texts(shard) == [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10]]
        assert shard.tokens.dtype.itemsize == struct.calcsize(LETTERS[code])
        assert isinstance(shard.tokens, np.memmap)

    def test_sequences_where_no_documents_are_listed(self, tmp_path: Path) -> None:
        index = megatron(tmp_path / "corpus", [[[1, 2], [3], [4, 5]]])
        whole = bytearray(index.read_bytes()[:-8])
        whole[26:34] = struct.pack("<Q", 1)
        index.write_bytes(whole)
        assert texts(only(index)) == [[1, 2], [3], [4, 5]]

    def test_empty_documents_and_sequences_are_left_out(self, tmp_path: Path) -> None:
        index = megatron(tmp_path / "corpus", [[], [[1], []], [[]], [[2, 3]], []])
        assert texts(only(index)) == [[1], [2, 3]]

    def test_checks_the_index_in_chunks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(foreign, "_CHUNK", 2)
        index = megatron(tmp_path / "corpus")
        assert texts(only(index)) == [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10]]
        whole = bytearray(index.read_bytes())
        whole[34 + 16 + 24 : 34 + 16 + 32] = struct.pack("<q", 99)
        index.write_bytes(whole)
        refused("corpus.idx: sequence 3 has 4 tokens from byte 99, where byte 12 comes next", index)

    @pytest.mark.parametrize(
        ("place", "replaced", "told"),
        [
            (slice(0, 6), b"TNTIDX", "corpus.idx is no index of Megatron's"),
            (slice(9, 17), struct.pack("<Q", 2), "is of version 2"),
            (slice(17, 18), b"\x09", "the unknown dtype 9"),
            (slice(17, 18), b"\x07", "float32, and ids are integers"),
            (slice(18, 26), struct.pack("<Q", 2**40), "1,099,511,627,776 sequences"),
            (slice(20, None), b"", "is truncated in its header, after 20 bytes"),
            (slice(-1, None), b"", "114 bytes, and it has 113"),
            (slice(34, 38), struct.pack("<i", -3), "sequence 0 has -3 tokens"),
            (slice(42, 46), struct.pack("<i", 3), "sequence 3 has 4 tokens from byte 12, where byte 14 comes next"),
            (
                slice(46, 50),
                struct.pack("<i", 3),
                "corpus.bin is truncated or not corpus.idx's: 10 tokens .* 9 in the index",
            ),
            (slice(82, 90), struct.pack("<q", 1), "document border 0 is sequence 1"),
            (slice(90, 98), struct.pack("<q", 4), "document border 2 is sequence 3"),
            (slice(106, 114), struct.pack("<q", 3), "document border 3 is sequence 3; borders ascend from 0 to 4"),
        ],
    )
    def test_damage_is_named(self, tmp_path: Path, place: slice, replaced: bytes, told: str) -> None:
        index = megatron(tmp_path / "corpus")
        whole = bytearray(index.read_bytes())
        whole[place] = replaced
        index.write_bytes(whole)
        refused(told, index)

    def test_other_faults_are_named(self, tmp_path: Path) -> None:
        index = megatron(tmp_path / "corpus")
        refused(
            "corpus.bin states that it holds uint16, and tokens.dtype is uint32",
            index.with_suffix(".bin"),
            dtype="uint32",
        )
        index.with_suffix(".bin").write_bytes(b"\0" * 19)
        refused("corpus.bin is truncated or not of uint16: its 19 bytes", index)
        index.with_suffix(".bin").unlink()
        refused("corpus.bin can't be read: No such file", index)
        refused("several modalities", megatron(tmp_path / "pictures", modes=True))
        refused("holds no tokens", megatron(tmp_path / "empty", []))

    @pytest.mark.slow
    def test_opens_an_index_of_10_million_documents_at_once(self, tmp_path: Path) -> None:
        documents = 10_000_000
        with (tmp_path / "corpus.bin").open("wb") as file:
            file.truncate(2 * documents)
        with (tmp_path / "corpus.idx").open("wb") as file:
            file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
            file.write(np.ones(documents, "<i4").tobytes())
            file.write((2 * np.arange(documents, dtype="<i8")).tobytes())
            file.write(np.arange(documents + 1, dtype="<i8").tobytes())
        shard = only(tmp_path / "corpus.idx")
        assert (len(shard.ends), len(shard.tokens)) == (documents, documents)


class TestLlmC:
    def test_header_states_the_dtype(self, tmp_path: Path) -> None:
        gpt = only(llm_c(tmp_path / "gpt.bin", [50256, 1, 2, 50256, 3]), end=50256)
        assert texts(gpt) == [[50256], [1, 2, 50256], [3]]
        assert gpt.tokens.dtype == np.uint16
        llama = only(llm_c(tmp_path / "llama.bin", [128000, 1], magic=20240801, version=7))
        assert texts(llama) == [[128000, 1]]

    def test_faults_are_named(self, tmp_path: Path) -> None:
        path = tmp_path / "a.bin"
        refused("5 tokens in its header, 3 in the file", llm_c(path, [1, 2, 3], count=5))
        refused("version 2 of llm.c's format", llm_c(path, [1], version=2))
        refused("holds uint16, and tokens.dtype is uint32", llm_c(path, [1]), dtype="uint32")
        refused("multiple-choice", llm_c(path, [1], magic=20240522))
        refused("holds no tokens", llm_c(path, []))
        path.write_bytes(llm_c(path, []).read_bytes()[:500])
        refused("500 bytes of llm.c's header", path)


class TestRaw:
    @pytest.mark.parametrize(("dtype", "letter"), [("uint16", "H"), ("uint32", "I"), ("int32", "i"), ("int64", "q")])
    def test_dtype_is_stated(self, tmp_path: Path, dtype: str, letter: str) -> None:
        path = tmp_path / "train.bin"
        path.write_bytes(struct.pack(f"<6{letter}", 7, 8, 0, 9, 0, 0))
        assert texts(only(path, dtype)) == [[7, 8, 0, 9, 0, 0]]
        assert texts(only(path, dtype, end=0)) == [[7, 8, 0], [9, 0], [0]]
        assert isinstance(only(path, dtype).tokens, np.memmap)

    def test_dtype_is_never_guessed(self, tmp_path: Path) -> None:
        path = tmp_path / "train.bin"
        path.write_bytes(struct.pack("<4H", 1, 2, 3, 4))
        refused("train.bin does not say .* set tokens.dtype to uint16 .* or uint32", path)
        refused("train.bin does not say .* set mix.web.dtype", path, key="mix.web.")

    def test_faults_are_named(self, tmp_path: Path) -> None:
        path = tmp_path / "train.bin"
        path.write_bytes(struct.pack("<3H", 1, 2, 3))
        refused("train.bin is truncated or not of uint32: its 6 bytes .* multiple of 4", path, dtype="uint32")
        refused("tokens.dtype: 'uint-16' is none of uint16, uint32, int32, int64", path, dtype="uint-16")
        refused("none of its 3 tokens is 50256, with which the tokenizer ends", path, dtype="uint16", end=50256)
        refused("none of its 3 tokens is 100257", path, dtype="uint16", end=100257)
        path.write_bytes(b"")
        refused("train.bin holds no tokens", path, dtype="uint16")
        refused("is a folder: name the files", tmp_path, dtype="uint16")
        refused("none.bin can't be read: No such file", tmp_path / "none.bin", dtype="uint16")


class TestNpy:
    def test_header_states_the_dtype(self, tmp_path: Path) -> None:
        shard = only(npy(tmp_path / "a.npy", "<u2", "(4,)", struct.pack("<4H", 5, 0, 6, 7)), end=0)
        assert texts(shard) == [[5, 0], [6, 7]]
        assert texts(only(npy(tmp_path / "b.npy", ">u4", "(2,)", struct.pack(">2I", 1, 70000)), "uint32")) == [
            [1, 70000]
        ]

    def test_is_read_as_numpy_writes_it(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.arange(9, dtype=np.int64))
        shard = only(tmp_path / "a.npy", dtype="int64")
        assert texts(shard) == [list(range(9))]
        assert isinstance(shard.tokens, np.memmap)

    def test_faults_are_named(self, tmp_path: Path) -> None:
        path, tokens = tmp_path / "a.npy", struct.pack("<4H", 1, 2, 3, 4)
        refused("a.npy is truncated or no .npy file", npy(path, "<u2", "(5,)", tokens))
        refused("2 bytes after the 3 tokens", npy(path, "<u2", "(3,)", tokens))
        refused(r"holds uint16 of shape \(2, 2\)", npy(path, "<u2", "(2, 2)", tokens))
        refused("holds float16 of shape", npy(path, "<f2", "(4,)", tokens))
        refused("holds uint16, and tokens.dtype is uint32", npy(path, "<u2", "(4,)", tokens), dtype="uint32")
        refused("holds no tokens", npy(path, "<u2", "(0,)", b""))
        path.write_bytes(b"PK")
        refused("a.npy is truncated or no .npy file", path)

    def test_may_hold_tokens_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "part-0.npy"
        path.write_bytes(struct.pack("<4H", 5, 0, 6, 7))
        assert texts(only(path, "uint16", end=0)) == [[5, 0], [6, 7]]
        refused("tokens and nothing else, as OLMo's files of this name, set tokens.dtype to uint16", path)


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 7))
def test_ends_are_found_across_chunks(tokens: list[int], chunk: int) -> None:
    expected = [at + 1 for at, token in enumerate(tokens) if token == 0 or at == len(tokens) - 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign, "_CHUNK", chunk)
        assert ends_of(np.array(tokens, np.uint16), 0).tolist() == expected


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=40), st.integers(1, 7))
def test_largest_across_chunks(tokens: list[int], chunk: int) -> None:
    shard = Shard(Path("a.bin"), np.array(tokens, np.uint16), np.array([len(tokens)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign, "_CHUNK", chunk)
        assert largest(shard) == (max(tokens), tokens.index(max(tokens)))


def test_a_negative_id_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "_CHUNK", 2)
    path = tmp_path / "a.bin"
    path.write_bytes(struct.pack("<5i", 4, 5, 6, -7, -8))
    with pytest.raises(ConfigError, match="a.bin: token 3 is -7; ids are not negative"):
        largest(only(path, "int32"))


def test_nothing_is_read_before_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "big.bin"
    with path.open("wb") as file:
        file.truncate(2**40)  # a terabyte that takes no space
    assert len(only(path, "uint32").tokens) == 2**38

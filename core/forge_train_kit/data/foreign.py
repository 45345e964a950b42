"""Token files that other programs wrote, as shards: mapped, with nothing guessed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forge_train.base.errors import ConfigError

from .shard import Ids, Shard

Int64s = NDArray[np.int64]

RAW = ("uint16", "uint32", "int32", "int64")
"""Dtypes that a file without a header may be declared to hold."""

_CHUNK = 2**22
"""Tokens, or sequences of an index, that are looked at together."""
_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_LLM_C_HEADER = 256 * 4
_LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""Magic → version and dtype: GPT-2's tokens and Llama 3's."""
_LLM_C_EVALUATION = 20240522
_NPY = b"\x93NUMPY"


def open_foreign(path: Path, *, dtype: str | None, end: int | None, key: str) -> list[Shard]:
    """The shard of a file, or of a pair of files, of another program:

    - Megatron's `.bin` and `.idx` (`indexed_dataset.py`), named by either or without a suffix; documents are those of
      the index, or its sequences where the index lists no documents; empty ones are left out.
    - llm.c's `.bin` with a header of 256 int32 (`data_common.py`; modded-nanogpt's too).
    - `.npy` with one axis of integers.
    - Any other file (nanoGPT), and a `.npy` without numpy's header (OLMo), is tokens and nothing else, little-endian,
      of the dtype that is stated.

    The last three have no index: a document ends with each token `end`, and without `end` the file is one document.

    Args:
        dtype: one of `RAW`. May be stated for a file that states its own, and must then agree.
        end: the tokenizer's end-of-document id. The file is read once to find it.
        key: what stands before `dtype` in messages: `tokens.` for the key, `--` for the option.

    Raises:
        ConfigError: naming the file, and the place in it or the option.
    """
    if dtype is not None and dtype not in RAW:
        raise ConfigError(f"{key}dtype: {dtype!r} is none of {', '.join(RAW)}")
    try:
        tokens, ends = _read(path, dtype, key)
    except OSError as error:
        raise ConfigError(f"{error.filename or path} can't be read: {error.strerror or error}") from error
    if not len(tokens):
        raise ConfigError(f"{path} holds no tokens")
    if dtype is not None and tokens.dtype.newbyteorder("=") != np.dtype(dtype):
        raise ConfigError(f"{path} states that it holds {tokens.dtype}, and {key}dtype is {dtype}")
    if ends is None:
        ends = np.array([len(tokens)], np.int64) if end is None else ends_of(tokens, end)
        if end is not None and len(ends) == 1 and tokens[-1] != end:
            raise ConfigError(
                f"{path}: none of its {len(tokens):,} tokens is {end}, with which the tokenizer ends a document: "
                "they do not belong together"
            )
    return [Shard(path, tokens, ends)]


def ends_of(tokens: Ids, end: int) -> Int64s:
    """Return where each document ends (exclusive), its last token being `end`; tokens after the last `end` are a
    document too. `[tokens]` → `[documents]`; reads all tokens once, in chunks."""
    ends = [np.flatnonzero(chunk == end) + (start + 1) for start, chunk in _chunks(tokens)]
    if len(tokens) and tokens[-1] != end:
        ends.append(np.array([len(tokens)]))
    return np.concatenate([np.empty(0, np.int64), *ends], dtype=np.int64)


def largest(shard: Shard) -> tuple[int, int]:
    """The largest id and its first position, to be checked against a vocabulary; reads all tokens once, in chunks.

    Raises:
        ConfigError: for a negative id, naming the file and the position.
    """
    most, place = -1, 0
    for start, chunk in _chunks(shard.tokens):
        if shard.tokens.dtype.kind == "i" and chunk.min() < 0:
            at = int(np.flatnonzero(chunk < 0)[0])
            raise ConfigError(f"{shard.path}: token {start + at:,} is {chunk[at]}; ids are not negative")
        at = int(chunk.argmax())
        if int(chunk[at]) > most:
            most, place = int(chunk[at]), start + at
    return most, place


def _chunks(tokens: Ids) -> Iterator[tuple[int, Ids]]:
    for start in range(0, len(tokens), _CHUNK):
        yield start, tokens[start : start + _CHUNK]


def _read(path: Path, dtype: str | None, key: str) -> tuple[Ids, Int64s | None]:
    """The tokens of a file, and its documents' ends if it knows them."""
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    data, index = (stem.with_name(f"{stem.name}{suffix}") for suffix in (".bin", ".idx"))
    if path.suffix == ".idx" or (index.is_file() and (path.suffix == ".bin" or not path.exists())):
        return _megatron(data, index)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name the files in it that hold tokens, as in {path}/train_*.bin")
    with path.open("rb") as file:
        start = file.read(_LLM_C_HEADER)
    if path.suffix == ".npy" and start.startswith(_NPY):
        return _npy(path), None
    if path.suffix == ".npy" and dtype is None:
        raise ConfigError(
            f"{path} is truncated or no .npy file. If it holds tokens and nothing else, as OLMo's files of this name, "
            f"set {key}dtype to uint16 or uint32"
        )
    magic, version, tokens = struct.unpack_from("<3i", start.ljust(12, b"\0"))
    if magic in _LLM_C and path.suffix == ".bin":
        return _llm_c(path, len(start), magic, version, tokens), None
    if magic == _LLM_C_EVALUATION and path.suffix == ".bin":
        raise ConfigError(f"{path} holds llm.c's multiple-choice questions, not documents")
    if dtype is None:
        raise ConfigError(
            f"{path} does not say how its tokens are stored: set {key}dtype to uint16 (vocabularies up to 65,536, as "
            "GPT-2's) or uint32 (larger ones)"
        )
    return _map(path, np.dtype(dtype).newbyteorder("<"), 0), None


def _map(path: Path, dtype: np.dtype[np.integer], offset: int) -> Ids:
    size = path.stat().st_size - offset
    if size % dtype.itemsize:
        raise ConfigError(
            f"{path} is truncated or not of {dtype}: its {size:,} bytes of tokens are no multiple of {dtype.itemsize}"
        )
    if not size:
        return np.empty(0, dtype)  # which can't be mapped
    return np.memmap(path, dtype, mode="r", offset=offset)


def _npy(path: Path) -> Ids:
    try:
        tokens: Ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{path} is truncated or no .npy file: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(f"{path} holds {tokens.dtype} of shape {tokens.shape}, and not one axis of integers")
    if isinstance(tokens, np.memmap) and (extra := path.stat().st_size - tokens.offset - tokens.nbytes):
        raise ConfigError(f"{path} has {extra:,} bytes after the {len(tokens):,} tokens of its header")
    return tokens


def _llm_c(path: Path, header: int, magic: int, version: int, tokens: int) -> Ids:
    known, dtype = _LLM_C[magic]
    if header < _LLM_C_HEADER:
        raise ConfigError(f"{path} is truncated: {header} bytes of llm.c's header of {_LLM_C_HEADER:,}")
    if version != known:
        raise ConfigError(f"{path} is of version {version} of llm.c's format, and only version {known} is known")
    found = _map(path, np.dtype(dtype).newbyteorder("<"), _LLM_C_HEADER)
    if len(found) != tokens:
        raise ConfigError(
            f"{path} is truncated or damaged: {tokens:,} tokens in its header, {len(found):,} in the file"
        )
    return found


def _megatron(data: Path, index: Path) -> tuple[Ids, Int64s]:
    with index.open("rb") as file:
        start = file.read(_MEGATRON_HEADER.size)
    if not start.startswith(_MEGATRON):
        raise ConfigError(f"{index} is no index of Megatron's: it does not begin with MMIDIDX")
    if len(start) < _MEGATRON_HEADER.size:
        raise ConfigError(f"{index} is truncated in its header, after {len(start)} bytes")
    _, version, code, sequences, documents = _MEGATRON_HEADER.unpack(start)
    if version != 1:
        raise ConfigError(f"{index} is of version {version} of Megatron's format, and only version 1 is known")
    name = _MEGATRON_DTYPES.get(code, f"the unknown dtype {code}")
    if "int" not in name:
        raise ConfigError(f"{index} says that the tokens are {name}, and ids are integers")
    size, expected = index.stat().st_size, len(start) + 12 * sequences + 8 * documents
    if sequences and size == expected + sequences:
        raise ConfigError(f"{index} has a mode for each sequence: data sets of several modalities are not supported")
    if size != expected:
        raise ConfigError(
            f"{index} is truncated or damaged: {sequences:,} sequences and {documents:,} document borders take "
            f"{expected:,} bytes, and it has {size:,}"
        )
    tokens = _map(data, np.dtype(name).newbyteorder("<"), 0)
    if not sequences:
        return tokens[:0], np.empty(0, np.int64)
    held = np.memmap(index, np.uint8, mode="r", offset=len(start))
    lengths, pointers, borders = np.split(held, [4 * sequences, 12 * sequences])
    ends = _sequence_ends(index, lengths.view("<i4"), pointers.view("<i8"), tokens)
    if documents > 1:
        ends = ends[_document_ends(index, borders.view("<i8"), sequences)]
    return tokens, ends[np.diff(ends, prepend=0) > 0]


def _sequence_ends(index: Path, lengths: NDArray[np.int32], pointers: Int64s, tokens: Ids) -> Int64s:
    """Return where each sequence ends, if the sequences are contiguous and fill the file."""
    ends = np.cumsum(lengths, dtype=np.int64)
    itemsize = tokens.dtype.itemsize
    for start in range(0, len(ends), _CHUNK):
        here = slice(start, start + _CHUNK)
        wrong = (lengths[here] < 0) | (pointers[here] != (ends[here] - lengths[here]) * itemsize)
        if wrong.any():
            at = start + int(wrong.argmax())
            raise ConfigError(
                f"{index}: sequence {at:,} has {lengths[at]:,} tokens from byte {pointers[at]:,}, where byte "
                f"{(int(ends[at]) - int(lengths[at])) * itemsize:,} comes next"
            )
    if ends[-1] != len(tokens):
        raise ConfigError(
            f"{index.with_suffix('.bin')} is truncated or not {index.name}'s: {len(tokens):,} tokens of {tokens.dtype} "
            f"in the file, {ends[-1]:,} in the index"
        )
    return ends


def _document_ends(index: Path, borders: Int64s, sequences: int) -> Int64s:
    """The last sequence of each document that has one."""
    falls = np.flatnonzero(np.diff(borders) < 0)
    if borders[0] != 0 or borders[-1] != sequences or len(falls):
        at = int(falls[0]) + 1 if len(falls) else 0 if borders[0] else len(borders) - 1
        raise ConfigError(
            f"{index} is damaged: document border {at:,} is sequence {borders[at]:,}; borders ascend "
            f"from 0 to {sequences:,}"
        )
    return borders[1:][np.diff(borders) > 0] - 1

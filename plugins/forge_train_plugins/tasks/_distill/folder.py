"""A folder of log-probabilities: parts that are written one after the other, sealed, and looked up by rows' keys."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from forge_train import MASKED, Batch, ConfigError
from forge_train.store.manifest import hash_of
from forge_train.store.tensor_files import DTYPES, as_bytes, described

KEYS, ENDS, TOP, VALUES = "keys", "ends", "tokens", "log_probabilities"
PART_BYTES = 64 << 20
"""Of one part: so much work is lost if a process is killed while it fills the folder."""
_TYPES = {name: dtype for dtype, name in DTYPES.items()}


def row_keys(batch: Batch) -> list[int]:
    """A hash of each row up to its last label: of the tokens, the labels, and what else the model is given; 0 for
    padding."""
    more = [batch.extras[name] for name in sorted(batch.extras) if batch.axes_of(name).batch == 0]
    along = [one for one in (batch.inputs, batch.labels, batch.position_ids, batch.document_ids) if one is not None]
    keys = []
    for row, labels in enumerate(batch.labels):
        learned = (labels != MASKED).nonzero()
        end = int(learned[-1]) + 1 if len(learned) else 0
        found = hashlib.blake2b(digest_size=8)
        for tensor in [one[row, :end] for one in along] + [one[row] for one in more]:
            found.update(as_bytes(tensor))
        keys.append((int.from_bytes(found.digest(), "little", signed=True) or 1) if end else 0)
    return keys


def parts(folder: Path) -> list[str]:
    """The names of the finished parts."""
    return sorted(file.name for file in folder.glob("part-*.safetensors"))


def number_of(part: str) -> int:
    """The number in the name of a part."""
    return int(part.partition("-")[2].partition(".")[0])


def hashes(files: Sequence[Path]) -> dict[str, str | None]:
    """Name → hash of files; None for one that is not there."""
    found: dict[str, str | None] = {}
    for file in files:
        try:
            with file.open("rb") as data:
                found[file.name] = hash_of(data)
        except FileNotFoundError:
            found[file.name] = None
    return found


@dataclass
class Writer:
    """Collects rows, and writes a part whenever there are enough; each is there whole or not at all.

    Args:
        folder: of the parts.
        first: number of the first part.
        step: from one part's number to the next one's.
        dtype: of log-probabilities.
    """

    folder: Path
    first: int
    step: int
    dtype: torch.dtype
    _rows: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    _bytes: int = 0

    def add(self, key: int, tokens: Tensor, values: Tensor) -> None:
        """Add a row: `[positions, k]` int32 and `[positions, k + 1]`."""
        self._rows.append((key, tokens.cpu(), values.to("cpu", self.dtype)))
        self._bytes += sum(one.nbytes for one in self._rows[-1][1:])
        if self._bytes >= PART_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was collected."""
        from safetensors.torch import save

        if not self._rows:
            return
        keys, tokens, values = zip(*self._rows, strict=True)
        tensors = {
            KEYS: torch.tensor(keys, dtype=torch.int64),
            ENDS: torch.tensor([len(one) for one in tokens], dtype=torch.int64).cumsum(0),
            TOP: torch.cat(tokens),
            VALUES: torch.cat(values),
        }
        target = self.folder / f"part-{self.first:06d}.safetensors"
        part = target.with_name(f".{target.name}.partial")
        with part.open("wb") as out:
            out.write(save(tensors, {"format": "pt"}))
            out.flush()
            os.fsync(out.fileno())
        part.replace(target)
        self.first += self.step
        self._rows, self._bytes = [], 0


class Rows:
    """The rows of a folder's parts. Their keys are in memory, and their values are read when they are asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        """
        Raises:
            ConfigError: for a part that is damaged.
        """
        self._parts = [(file, described(file)) for file in files]
        keys, places = [], []
        for number, (file, table) in enumerate(self._parts):
            own = _read(file, table[KEYS])
            ends = _read(file, table[ENDS])
            starts = torch.cat([ends.new_zeros(1), ends[:-1]])
            keys.append(own)
            places.append(torch.stack([torch.full_like(own, number), starts, ends - starts], 1))
        both, order = torch.cat([*keys, torch.empty(0, dtype=torch.int64)]).sort()
        self._keys = both.numpy()
        self._places = torch.cat([*places, torch.empty(0, 3, dtype=torch.int64)])[order]

    def has(self, key: int) -> bool:
        """Return True for the key of a row that is there; padding always is."""
        at = bisect_left(self._keys, key)
        return not key or (at < len(self._keys) and self._keys[at] == key)

    def row(self, key: int) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of a row that is there, `[positions, k]` int32 and `[positions, k + 1]`."""
        number, start, count = self._places[bisect_left(self._keys, key)].tolist()
        file, table = self._parts[number]
        return _read(file, table[TOP], start, count), _read(file, table[VALUES], start, count)


def _read(file: Path, place: tuple[str, tuple[int, ...], int], start: int = 0, count: int = -1) -> Tensor:
    """Some rows of a tensor in a file; by default all.

    Raises:
        ConfigError: if the file ends before.
    """
    kind, shape, first = place
    dtype, count = _TYPES[kind], shape[0] if count < 0 else count
    each = dtype.itemsize * (shape[1] if len(shape) > 1 else 1)
    wanted = count * each
    if not wanted:
        return torch.empty((0, *shape[1:]), dtype=dtype)
    with file.open("rb", buffering=0) as data:
        data.seek(first + start * each)
        read = bytearray(wanted)
        if data.readinto(read) != wanted:
            raise ConfigError(f"distill.stored: {file} ends before the values that its header lists.")
    return torch.frombuffer(read, dtype=dtype).view(count, *shape[1:])

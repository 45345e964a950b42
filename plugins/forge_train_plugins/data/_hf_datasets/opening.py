"""Opens data sets of the library `datasets` as a configuration names them."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_train import ConfigError
from forge_train.base.errors import ForgeError, describe
from forge_train_kit.data.formats import text_of, utf8
from forge_train_kit.data.held_out import Side, side_of


@dataclass(frozen=True, slots=True)
class Wanted:
    """Data set to load.

    Args:
        path: a name on the hub, a builder such as `json`, a folder of files, or one that `save_to_disk` wrote.
        name: of the builder's configuration; empty for its default.
        data_files: of a builder; none for its own.
        split: of the data set.
    """

    path: str
    name: str
    data_files: tuple[str, ...]
    split: str

    @property
    def label(self) -> str:
        return f"{self.path} (split {self.split!r})"


@contextmanager
def telling(label: str) -> Iterator[None]:
    """Turn the library's failures into one sentence.

    Raises:
        ConfigError: in place of the original error.
    """
    try:
        yield
    except ForgeError:
        raise
    except Exception as error:  # of builders, formats, networks: the library has no base class for them
        reason = describe(error).splitlines()[0]
        raise ConfigError(f"hf_datasets.path: {label} can't be read: {reason}") from error


def open_table(wanted: Wanted) -> Any:
    """A data set with random access, in the library's cache."""
    import datasets

    with telling(wanted.label):
        if saved(wanted.path):
            try:
                return _split(datasets.load_from_disk(wanted.path), wanted)
            except IndexError as error:  # a folder without a file of records
                raise ConfigError(f"hf_datasets.path: {wanted.label} has no records.") from error
        return datasets.load_dataset(**_arguments(wanted))


def open_stream(wanted: Wanted, rank: int, ranks: int) -> Any:
    """A rank's share of a data set that is read while it is used.

    It is every `ranks`-th record: shares differ by one record at most, however uneven the files are. Files of its own
    would spare a rank the reading of others, but a rank with smaller files would repeat them more often.
    """
    import datasets

    with telling(wanted.label):
        if saved(wanted.path):
            table = open_table(wanted)
            if len(table) < ranks:
                raise ConfigError(f"hf_datasets.path: {wanted.label} has {len(table)} records for {ranks} data ranks.")
            return table.shard(ranks, rank, contiguous=True).to_iterable_dataset()
        found = datasets.load_dataset(**_arguments(wanted), streaming=True)
        return found if ranks == 1 else found.filter(lambda _, at: at % ranks == rank, with_indices=True)


def saved(path: str) -> bool:
    """Return True for a folder that `save_to_disk` wrote."""
    return any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _arguments(wanted: Wanted) -> dict[str, Any]:
    files = {"data_files": list(wanted.data_files)} if wanted.data_files else {}
    return {"path": wanted.path, "name": wanted.name or None, "split": wanted.split, **files}


def _split(found: Any, wanted: Wanted) -> Any:
    """One split of what `load_from_disk` gave."""
    splits = dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
    if wanted.split not in splits:
        raise ConfigError(
            f"hf_datasets.path: {wanted.path} has no split {wanted.split!r}; there is {', '.join(map(repr, splits))}."
        )
    return splits[wanted.split]


def files_of(table: Any, wanted: Wanted, field: str, cache: Path) -> tuple[str, ...]:
    """Arrow files that hold the records of a data set, all of them and no others, in order.

    They are the library's own, or, where it has chosen some of their records, new ones in the cache.

    Raises:
        ConfigError: the data set has no records, or not that field.
    """
    if not len(table):
        raise ConfigError(f"hf_datasets.path: {wanted.label} has no records.")
    if field not in table.column_names:
        text_of(dict.fromkeys(table.column_names), field, f"hf_datasets.path: {wanted.label}", "hf_datasets.field")
    files = tuple(one["filename"] for one in table.cache_files)
    if files and _rows(files) == len(table) and table._indices is None:
        return files
    folder = cache / f"chosen-{table._fingerprint}"
    if not folder.is_dir():
        part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
        with telling(wanted.label):
            table.select_columns([field]).save_to_disk(part)
        try:
            part.replace(folder)
        except OSError:  # another process was first
            shutil.rmtree(part)
    return tuple(str(file) for file in sorted(folder.glob("*.arrow")))


def _rows(files: tuple[str, ...]) -> int:
    import pyarrow as pa

    count = 0
    for file in files:
        with pa.memory_map(file) as mapped:
            count += sum(batch.num_rows for batch in pa.ipc.open_stream(mapped))
    return count


@dataclass
class Texts:
    """The texts of one side of a stream, of one rank.

    Args:
        dataset: of the library, not shuffled: only then its state is exact.
        field: where a record has its text.
        side: which texts are given.
        held_out: share of the texts that is kept for evaluation.
        label: of the data set, for messages.
    """

    dataset: Any
    field: str
    side: Side
    held_out: float
    label: str
    _first: dict[str, Any] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._first = self.state()

    def read(self, state: Mapping[str, Any] | None) -> Iterator[bytes]:
        with telling(self.label):
            self.dataset.load_state_dict(dict(state or self._first))
            for record in self.dataset:
                text = text_of(record, self.field, f"hf_datasets.path: {self.label}", "hf_datasets.field")
                document = utf8(text, f"hf_datasets.path: {self.label}: {self.field!r}")
                if document and side_of(document, self.held_out) == self.side:
                    yield document

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.dataset.state_dict()
        return found

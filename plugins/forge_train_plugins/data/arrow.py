"""The format Arrow: IPC files and streams, as `datasets.save_to_disk` writes them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from forge_train_kit.data.columns import rows, telling
from forge_train_kit.data.files import File
from forge_train_kit.data.formats import END, Part, Record, require

_PART = 1 << 24
_MAGIC = b"ARROW1\0\0"


class Arrow:
    """Files on this machine are mapped, and parts are ranges of record batches; others are read as one stream."""

    def parts(self, file: File) -> Sequence[Part]:
        if file.packed or not file.local:
            return [Part(0, END, file.size())]
        parts: list[Part] = []
        with contextlib.closing(_batches(file)) as batches:
            begin = size = count = 0
            for index, batch in enumerate(batches, 1):
                size, count = size + batch.nbytes, count + batch.num_rows
                if size >= _PART:
                    parts.append(Part(begin, index, size, records=count))
                    begin, size, count = index, 0, 0
            if count:
                parts.append(Part(begin, index, size, records=count))
        return parts

    def read(self, file: File, part: Part) -> Iterator[tuple[str, Record]]:
        before = 0
        with contextlib.closing(_batches(file)) as batches:
            for index, batch in enumerate(itertools.islice(batches, part.stop if part.stop < END else None)):
                if index >= part.start:
                    yield from rows(batch, before)
                before += batch.num_rows


def _batches(file: File) -> Generator[Any, None, None]:
    """All record batches, in order."""
    pa = require("pyarrow", file.label)
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(file.open())
        mapped = file.local and not file.packed
        with telling(file, "Arrow"):
            whole = stream.read(len(_MAGIC)) == _MAGIC
            if mapped:
                source = stack.enter_context(pa.memory_map(file.address))
            else:
                source = pa.PythonFile(stream if whole else stack.enter_context(file.open()))
            if mapped and whole:
                reader = pa.ipc.open_file(source)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:  # what follows the first bytes of an IPC file is a stream
                batches = iter(pa.ipc.open_stream(source))
        for number in itertools.count(1):
            with telling(file, "Arrow", f"record batch {number}"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

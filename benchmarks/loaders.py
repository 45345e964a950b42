"""Token shards read beside other libraries' loaders, and a corpus of 10 GB opened: two parts of data.py."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

SEQUENCE, MICRO_BATCH = 2048, 8
SCALE = 20 if "--small" in sys.argv else 1
Row = tuple[str, str, str, bool]


def job(tokenizer: Any) -> Any:
    """What a data plugin asks for, on one process."""
    import torch

    return SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(micro_batch=MICRO_BATCH, sequence=SEQUENCE)),
        dist=SimpleNamespace(data_rank=0, data_ranks=1),
        hooks=SimpleNamespace(call=lambda spec, arguments: [] if spec.name == "modalities" else tokenizer),
        seed=0,
        device=torch.device("cpu"),
    )


def loader(folder: Path, **options: Any) -> Iterator[Any]:
    """Micro-batches of `tokens`."""
    from forge_train_kit.data.tokenizers import open_tokenizer
    from forge_train_plugins.data.tokens import Tokens

    made_with = "bytes" if not (folder / "tokenizer").is_dir() else str(folder / "tokenizer")
    return Tokens(Tokens.Config(path=str(folder), **options)).build_data(job(open_tokenizer(made_with)), "train")


def sparse(folder: Path, tokens: int, documents: int, shards: int) -> None:
    """A prepared folder whose tokens are holes: they read as 0 and take no space; the documents' ends are real."""
    from forge_train_kit.data.manifest import Listed, Manifest
    from forge_train_kit.data.store import MAGIC, START, VERSION, Header
    from forge_train_kit.data.tokenizers.byte import ByteTokenizer

    tokenizer, random, listed = ByteTokenizer(), np.random.default_rng(0), []
    for number in range(shards):
        lengths = random.lognormal(0, 1, documents // shards)
        ends = np.cumsum(lengths * (tokens / shards / lengths.sum())).astype(np.int64)
        ends = np.maximum.accumulate(np.maximum(ends, np.arange(1, len(ends) + 1)))
        count = int(ends[-1])
        header = Header("uint16", count, len(ends), count, 0, False, tokenizer.digest, f"holes {number}")
        text = json.dumps({name: getattr(header, name) for name in Header.__slots__}).encode()
        path = folder / f"train-{number:05d}.tokens"
        with path.open("wb") as file:
            sizes = np.array([VERSION, len(text)], "<u4").tobytes()
            file.write((MAGIC + sizes + text).ljust(START))
            file.seek(header.ends_at)
            file.write(ends.tobytes())
        listed.append(Listed(path.name, header))
    made_with = {"path": "bytes", "digest": tokenizer.digest, "vocabulary": 257, "end": 256}
    Manifest(made_with, {}, {"entries": [], "files": 0}, {"train": tuple(listed), "validation": ()}).write(folder)


def beside(folder: Path) -> dict[str, Callable[[], Iterator[Any]]]:
    """Loaders of the same tokens in the same rows, shuffled: epochs without end."""
    import datasets
    import torch
    from torch.utils.data import DataLoader, Dataset

    from forge_train_kit.data.manifest import open_prepared

    whole = np.concatenate([shard.tokens for shard in open_prepared(folder, key="").sides["train"].shards])
    np.save(folder / "rows.npy", whole)
    count = (len(whole) - 1) // SEQUENCE
    table = whole[: count * SEQUENCE].reshape(count, SEQUENCE).astype(np.int32)
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=SEQUENCE)})
    datasets.Dataset.from_dict({"input_ids": table}, features=features).save_to_disk(str(folder / "arrow"))
    del table

    class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
        tokens = np.load(folder / "rows.npy", mmap_mode="r")

        def __len__(self) -> int:
            return count

        def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
            ids = torch.from_numpy(self.tokens[row * SEQUENCE : (row + 1) * SEQUENCE + 1].astype(np.int64))
            return ids[:-1], ids[1:]

    def epochs(rows: Any) -> Iterator[Any]:
        while True:
            yield from DataLoader(rows, batch_size=MICRO_BATCH, shuffle=True, drop_last=True)

    arrow = datasets.load_from_disk(str(folder / "arrow")).with_format("torch")
    return {
        "torch.utils.data over numpy.memmap": lambda: epochs(Rows()),
        "datasets, Arrow in torch format": lambda: epochs(arrow),
    }


def rates(folder: Path) -> Iterator[Row]:
    """Tokens per CPU-second of one thread, all loaders in turn, the best of five rounds each."""
    import torch

    torch.set_num_threads(1)
    sparse(folder, 64_000_000 // SCALE, 80_000 // SCALE, 2)
    for file in folder.glob("*.tokens"):  # a hole is read faster than a page
        with file.open("r+b") as opened:
            content = opened.read()
            opened.seek(0)
            opened.write(content)
    ours: dict[str, Callable[[], Iterator[Any]]] = {
        "isolate on": lambda: loader(folder, held_out=0.0),
        "isolate off": lambda: loader(folder, held_out=0.0, isolate=False),
    }
    loaders = {name: iter(make()) for name, make in {**ours, **beside(folder)}.items()}
    best = dict.fromkeys(loaders, 0.0)
    for _ in range(5):
        for name, one in loaders.items():
            batches = 50 if "datasets" in name else 500
            next(one)
            began = time.process_time()
            for _ in range(batches):
                next(one)
            best[name] = max(best[name], batches * MICRO_BATCH * SEQUENCE / (time.process_time() - began))
    for name in ours:
        rate = best[name]
        yield f"`tokens`, {name}, M tokens per CPU-second", f"{rate / 1e6:.0f}", "≥ 100", rate >= 100e6
        for other in (other for other in loaders if other not in ours):
            ratio = rate / best[other]
            what = f"the same, over {other} ({best[other] / 1e6:.1f} M)"
            yield what, f"{ratio:.2f}", "≥ 1.0", ratio >= 1


def anonymous() -> int:
    """Bytes of this process's memory that are no map of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def opening(folder: Path, packing: str) -> None:
    """In a process of its own: seconds to the first batch, and how memory grows over 200."""
    for module in (
        "torch",
        "forge_train_kit.data.loader",
        "forge_train_kit.data.tokens",
        "forge_train_plugins.data.tokens",
    ):
        importlib.import_module(module)
    before = most = anonymous()
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.002):
            most = max(most, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, spent = time.perf_counter(), time.process_time()
    batches = loader(folder, held_out=0.01, packing=packing)
    next(batches)
    seconds, cpu = time.perf_counter() - began, time.process_time() - spent
    for _ in range(200):
        next(batches)
    ended.set()
    watcher.join()
    print(json.dumps({"seconds": seconds, "cpu": cpu, "bytes": max(most, anonymous()) - before}))


def start(folder: Path) -> Iterator[Row]:
    """Time and memory of a large corpus, in fresh processes."""
    sparse(folder, 5_000_000_000 // SCALE, 10_000_000 // SCALE, 160 // SCALE)

    def opened(packing: str, times: int) -> dict[str, float]:
        command = [sys.executable, __file__, str(folder), packing]
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        found = [
            json.loads(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)
            for _ in range(times)
        ]
        return {key: min(one[key] for one in found) for key in found[0]}

    of = "a corpus of 10 GB and 10 million documents"
    for packing, what, times, bars in (
        ("split", "", 3, True),
        ("best_fit", " with `best_fit`, its plan not yet made", 1, False),
        ("best_fit", " with `best_fit`, its plan kept", 3, True),
    ):
        found = opened(packing, times)
        seconds, grown = found["seconds"], found["bytes"] / 1e6
        measured = f"{seconds:.2f} ({found['cpu']:.2f} of CPU)"
        yield f"{of}: seconds to the first batch{what}", measured, "< 1" if bars else "—", not bars or seconds < 1
        more = f"{of}: MB of memory beyond the maps{what}, at its peak over 200 batches"
        yield more, f"{grown:.0f}", "≤ 50" if bars else "—", not bars or grown <= 50


if __name__ == "__main__":
    opening(Path(sys.argv[1]), sys.argv[2])

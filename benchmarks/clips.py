"""Decodes 10,000 clips, trains on as many, and writes benchmarks/results/clips.md.

python benchmarks/clips.py            # in some minutes
python benchmarks/clips.py 500        # so many times, without writing
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import av
import numpy as np

from forge_train import ConfigError, Plugin, hookimpl
from forge_train_kit.modalities import ItemSource
from forge_train_plugins.modalities._vision.modality import Clips
from forge_train_plugins.modalities.vision import Video
from forge_train_tools.testing import run_forge

RESULTS = Path(__file__).parent / "results" / "clips.md"
COUNT, BATCH = 10_000, 16
MOST = 1024
"""Bytes by which a clip may make memory grow, after the first tenth; one frame that is not freed has 12,288."""


def write(path: Path) -> None:
    """A clip of four seconds: 64 × 64 pixels, 12 frames a second."""
    draws = np.random.default_rng(0)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264" if path.suffix == ".mkv" else "mpeg4", rate=12)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for _ in range(48):
            picture = draws.integers(0, 256, (64, 64, 3), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def resident() -> float:
    """Memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def written(folder: Path) -> list[Path]:
    """Two clips, and one that is cut short."""
    files = [folder / name for name in ("a.mp4", "a.mkv", "cut.mkv")]
    for file in files[:2]:
        write(file)
    files[2].write_bytes(files[1].read_bytes()[:20_000])
    return files


def trained(count: int) -> list[float]:
    """Memory after each tenth of a run that trains on so many clips, which two threads decode."""
    memory: list[float] = []
    steps = count // BATCH // 10 * 10

    class Memory(Plugin):
        @hookimpl
        def on_step(self, step: Any) -> None:
            if step.step % (steps // 10) == 0:
                memory.append(resident())
                print(f"{step.step * BATCH:,} clips trained on: {memory[-1]:.1f} MiB", flush=True)

    with tempfile.TemporaryDirectory(prefix="forge-clips-") as name:
        folder = Path(name)
        files = written(folder)
        records = [{"text": f"<video>{at}", "videos": [files[at % 3].name]} for at in range(96)]
        (folder / "clips.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
        config = {
            "train": {"global_batch": BATCH, "micro_batch": BATCH, "sequence": 64, "evaluate_every": 0},
            "multimodal": {
                "path": str(folder / "clips.jsonl"),
                "cache": str(folder / "cache"),
                "packing": "pad",
                "prefetch": {"workers": 2, "on_error": "replace"},
            },
            "video": {"size": 64, "patch": 16, "frames": 8, "temporal": 2, "dim": 24, "layers": 1},
            "log.every": 10,
        }
        run_forge(("multimodal", "video", Memory), config, steps=steps, folder=folder / "runs")
    return memory


def decoded(count: int) -> tuple[list[float], float]:
    """Memory after each tenth of so many clips, and seconds of a clip."""
    modality = Clips(Video.Config(size=64, patch=16, frames=8, temporal=2))
    memory: list[float] = []
    with tempfile.TemporaryDirectory(prefix="forge-clips-") as folder:
        files = written(Path(folder))
        begun = time.process_time()
        for index in range(count):
            try:
                modality.read(ItemSource(str(files[index % 3]), f"record {index}"))
            except ConfigError:
                if index % 3 != 2:
                    raise
            if (index + 1) % (count // 10) == 0:
                memory.append(resident())
                print(f"{index + 1:,} clips: {memory[-1]:.1f} MiB", flush=True)
        return memory, (time.process_time() - begun) / count


def grown(memory: list[float], count: int) -> float:
    """Bytes by which a clip made memory grow, after the first tenth."""
    return (memory[-1] - memory[0]) * 2**20 / (0.9 * count)


def risen(memory: list[float], count: int) -> float:
    """Bytes of a clip by which the lowest memory of a run rose from its first half to its second: between, it comes
    and goes by many MiB."""
    half = len(memory) // 2
    return (min(memory[half:]) - min(memory[:half])) * 2**20 / (count / 2)


def table(memory: list[float], count: int) -> str:
    """Memory after each tenth."""
    lines = (f"| {(tenth + 1) * (count // 10):,} | {mib:.1f} MiB |\n" for tenth, mib in enumerate(memory))
    return "| clips | resident memory |\n|---|---|\n" + "".join(lines)


def main() -> int:
    count = int(sys.argv[1]) if sys.argv[1:] else COUNT
    steps = count // BATCH // 10 * 10
    alone, took = decoded(count)
    run = trained(steps * BATCH)
    where = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, av {av.__version__}"
    text = (
        "# Memory of decoding clips\n\n"
        f"Written by `python benchmarks/clips.py`. One process decodes {count:,} clips: MP4 and Matroska of 48 frames "
        "of 64 × 64 pixels, 8 of which are taken, and a file that is cut short and refused.\n\n"
        f"{time.strftime('%Y-%m-%d')}: {where}.\n\n{table(alone, count)}\n"
        f"After the first tenth it grew by {grown(alone, count):.0f} bytes a clip; {MOST:,} are allowed. A clip took "
        f"{1000 * took:.1f} ms.\n\n"
        "## In a run\n\n"
        f"A small model is trained on {steps * BATCH:,} of them, {BATCH} a step, which two threads decode. Empty clips "
        f"stand in for the one that is cut short.\n\n{table(run, steps * BATCH)}\n"
        "From the lowest of the first half to that of the second, memory rose by "
        f"{risen(run, steps * BATCH):.0f} bytes a clip; {MOST:,} are allowed.\n"
    )
    if not sys.argv[1:]:
        RESULTS.write_text(text, encoding="utf-8")
    print(text)
    return 0 if max(grown(alone, count), risen(run, steps * BATCH)) <= MOST else 1


if __name__ == "__main__":
    raise SystemExit(main())

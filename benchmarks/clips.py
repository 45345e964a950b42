"""Decodes clips 10,000 times in one process, and writes benchmarks/results/clips.md.

python benchmarks/clips.py            # in some minutes
python benchmarks/clips.py 500        # so many times, without writing
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import av
import numpy as np

from forge_train import ConfigError
from forge_train_kit.modalities import ItemSource
from forge_train_plugins.modalities._vision.modality import Clips
from forge_train_plugins.modalities.vision import Video

RESULTS = Path(__file__).parent / "results" / "clips.md"
COUNT = 10_000
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


def decoded(count: int) -> tuple[list[float], float]:
    """Memory after each tenth of so many clips, and seconds of a clip."""
    modality = Clips(Video.Config(size=64, patch=16, frames=8, temporal=2))
    memory: list[float] = []
    with tempfile.TemporaryDirectory(prefix="forge-clips-") as folder:
        files = [Path(folder) / name for name in ("a.mp4", "a.mkv", "cut.mkv")]
        for file in files[:2]:
            write(file)
        files[2].write_bytes(files[1].read_bytes()[:20_000])
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


def main() -> int:
    count = int(sys.argv[1]) if sys.argv[1:] else COUNT
    memory, took = decoded(count)
    grown = (memory[-1] - memory[0]) * 2**20 / (0.9 * count)
    where = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, av {av.__version__}"
    text = (
        "# Memory of decoding clips\n\n"
        f"Written by `python benchmarks/clips.py`. One process decodes {count:,} clips: MP4 and Matroska of 48 frames "
        "of 64 × 64 pixels, 8 of which are taken, and a file that is cut short and refused.\n\n"
        f"{time.strftime('%Y-%m-%d')}: {where}.\n\n"
        "| clips | resident memory |\n|---|---|\n"
    )
    rows = [f"| {(tenth + 1) * (count // 10):,} | {mib:.1f} MiB |" for tenth, mib in enumerate(memory)]
    told = (
        f"\nAfter the first tenth it grew by {grown:.0f} bytes a clip; {MOST:,} are allowed. "
        f"A clip took {1000 * took:.1f} ms.\n"
    )
    if not sys.argv[1:]:
        RESULTS.write_text(text + "\n".join(rows) + "\n" + told, encoding="utf-8")
    print(told.strip())
    return 0 if grown <= MOST else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Trains each fusion on drawn pictures and on clips, and asks it about others.

    python benchmarks/seeing.py                               # an hour of one core
    python benchmarks/seeing.py --only image/mot --log FILE   # part of it: what is in the log counts the next time

All is done by `forge train` and `forge eval`. What is drawn, and what is kept from training, is in `drawings.py`.
benchmarks/results/seeing.md is written when all fusions have seen pictures, seeing-clips.md when all have seen clips.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from drawings import STILL, Desk

os.environ.setdefault("OMP_NUM_THREADS", "1")

RESULTS = Path(__file__).parent / "results"
PAGES = {"image": "seeing.md", "video": "seeing-clips.md"}
TRAINED = {"image": 16_000, "video": 8_000}
ASKED = 200
BUDGET = 1200
"""CPU seconds: ten minutes of two cores."""
CONFIG = """
[train]
global_batch = 8
micro_batch = 8
evaluate_every = 200
evaluate_batches = 4

[multimodal]
path = "train.jsonl"
cache = "cache"

[image]
size = 32
patch = 8
merge = 1
dim = 64
layers = 2
heads = 4
std = 0.1
positions = "rotary"

[decoder]
dim = 96
layers = 2
heads = 4
max_sequence = 256
std = 0.06

[adamw]
lr = 2e-3

[cosine]
warmup = 0.05
floor = 0.01
"""
FUSIONS = {
    "prefix": (),
    "cross_attention": ("cross_attention.layers=[0, 1]", "cross_attention.gate=0.5"),
    "mot": (),
    "moma": ("moe.experts=8",),
}
STEPS = {"image": 1000, "video": 2000}
SEQUENCE = {"image": 128, "video": 72}
ONE_TOKEN = {"image": 56, "video": 64}
"""Sequence of `cross_attention`, where an item is one token, so that a step has about as many records."""
VIDEO = ("video.merge=4", "video.frames=4", "video.temporal=1", "multimodal.store=decoded", "adamw.lr=3e-3")
"""What a clip has beside the options of pictures."""
CROSS = ("cross_attention.gate=1.0", "decoder.std=0.1")
"""What `cross_attention` has beside them: a frame is one vector, whose features have to weigh more."""

DRAWN = {
    "image": "Pictures of 32 × 32 pixels with one to four shapes (circle, square, triangle) or a digit, in one of six "
    "colours.",
    "video": "Clips of four frames of 32 × 32 pixels, in which a shape (circle, square, triangle) in one of six "
    "colours moves up, down, left or right, from one of 4 × 4 cells to the next. The first frame tells one direction "
    "in three: the shape does not leave the picture. Clips are played backwards where that shows a "
    "combination that was trained on. Preparing the data, with decoding, counts as training.",
}
NOTE = (
    "A sixth of the combinations of these words is kept from training. "
    f"Questions are of {ASKED} of each kind that were not trained on. A small vision transformer and a decoder "
    "of two layers start from random weights, on one thread; ten minutes of two cores are 1,200 CPU seconds."
)


@dataclass
class Seen:
    """What a model answers right, by the kind of question, and the CPU seconds of its training and of its answers."""

    right: dict[str, float]
    training: float
    asking: float


def forge(folder: Path, *words: str) -> tuple[Any, float]:
    """The JSON and CPU seconds of a command on one thread."""
    from run import children

    before = children()
    command = [sys.executable, "-m", "forge_train_cli", *words, "--json"]
    done = subprocess.run(command, check=True, cwd=folder, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout), children() - before


def measured(folder: Path, kind: str, fusion: str) -> Seen:
    """Train and ask.

    Args:
        folder: of a `Desk`.
    """
    (folder / "see.toml").write_text(CONFIG.replace("[image]", f"[{kind}]"), encoding="utf-8")
    sequence = (ONE_TOKEN if fusion == "cross_attention" else SEQUENCE)[kind]
    options = [f"train.steps={STEPS[kind]}", f"train.sequence={sequence}", "run.device=cpu", *FUSIONS[fusion]]
    options += VIDEO if kind == "video" else ()
    options += CROSS if (kind, fusion) == ("video", "cross_attention") else ()
    sets = [part for one in options for part in ("-s", one)]
    plugins = f"multimodal,{kind},{fusion}" + (",moe" if fusion == "moma" else "")
    _, training = forge(folder, "train", "see.toml", "-p", plugins, *sets, "--name", fusion)
    told, asking = forge(folder, "eval", f"runs/{fusion}", "--task", "tasks.toml")
    return Seen({name: one["metrics"]["accuracy"]["value"] for name, one in told["tasks"].items()}, training, asking)


def chance(folder: Path) -> float:
    """How often two of the captions are the same."""
    lines = (folder / "new.jsonl").read_text(encoding="utf-8").splitlines()
    counts = Counter(json.loads(line)["answer"] for line in lines)
    return sum((count / len(lines)) ** 2 for count in counts.values())


class Log:
    """What is done, one a line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.done = {(one.pop("kind"), one.pop("fusion")): Seen(**one) for one in map(json.loads, lines)}

    def add(self, kind: str, fusion: str, seen: Seen) -> None:
        self.done[kind, fusion] = seen
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "fusion": fusion, **asdict(seen)}) + "\n")


def bars(kind: str, fusion: str, seen: Seen, guessed: float) -> list[tuple[str, str, str, bool]]:
    """What is measured, how much it is, the bar, and whether it is met."""
    right, what = seen.right, f"`{fusion}`, {'pictures' if kind == 'image' else 'clips'}"
    most, still = (one + 3 * (one * (1 - one) / ASKED) ** 0.5 for one in (guessed, STILL))
    rows = [
        (f"{what}: captions that are right to the letter", right["new"], "≥ 95 %", right["new"] >= 0.95),
        (f"{what}: of combinations that were kept from training", right["unseen"], "—", True),
        (f"{what}: of another one", right["other"], f"≤ {most:.1%}, chance", right["other"] <= most),
    ]
    if kind == "video":
        rows += [
            (
                f"{what}: played backwards, with the opposite direction",
                right["reversed"],
                "≥ 95 %",
                right["reversed"] >= 0.95,
            ),
            (f"{what}: of the first frame alone", right["still"], f"≤ {still:.1%}, chance", right["still"] <= still),
        ]
    shares = [(what, f"{share:.1%}", bar, met) for what, share, bar, met in rows]
    return [
        *shares,
        (f"{what}: CPU seconds of training", f"{seen.training:.0f}", f"≤ {BUDGET}", seen.training <= BUDGET),
    ]


def rows(kind: str, fusions: list[str], log: Log) -> list[tuple[str, str, str, bool]]:
    """Measure what is missing of these fusions."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        desk = Desk(Path(name) / kind, kind)
        desk.fill(TRAINED[kind], ASKED)
        for fusion in fusions:
            if (kind, fusion) not in log.done:
                log.add(kind, fusion, measured(desk.folder, kind, fusion))
            found += bars(kind, fusion, log.done[kind, fusion], chance(desk.folder))
    return found


def main(arguments: list[str] | None = None) -> list[tuple[str, str, str, bool]]:
    from run import Row, table

    cells = [f"{kind}/{fusion}" for kind, fusion in product(PAGES, FUSIONS)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=cells, help="this cell; may be repeated")
    parser.add_argument("--log", type=Path, default=Path("seeing.jsonl"), help="where cells that are done are kept")
    asked = parser.parse_args(arguments)
    log, every = Log(asked.log), []
    for kind, page in PAGES.items():
        fusions = [one for one in FUSIONS if f"{kind}/{one}" in (asked.only or cells)]
        found = rows(kind, fusions, log) if fusions else []
        if len(fusions) == len(FUSIONS):
            written = [Row(*one) for one in found]
            text = table(written, "Seeing", "python benchmarks/seeing.py", f"{DRAWN[kind]} {NOTE}")
            (RESULTS / page).write_text(text, encoding="utf-8")
        every += found
    return every


if __name__ == "__main__":
    for what, how_much, bar, met in main():
        print(f"{'ok  ' if met else 'MISS'} {what}: {how_much} (bar {bar})")

"""Each fusion learns what pictures show and where clips move, and tells it of others that it has not seen."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from forge_train_tools import open_model
from forge_train_tools.testing import run_forge

av = pytest.importorskip("av")
pillow = pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

COLOURS = {"r": (200, 40, 40), "b": (40, 60, 210)}
MOVES = {"<": -1, ">": 1}
SIDE, FRAMES, ASKED = 16, 4, 64
ENCODER = {"size": SIDE, "patch": 4, "merge": 4, "dim": 32, "layers": 1, "heads": 2, "std": 0.2}
MODEL = {
    "run.device": "cpu",
    "decoder": {"dim": 32, "layers": 2, "heads": 2, "std": 0.15, "max_sequence": 128},
    "image": ENCODER,
    "video": {**ENCODER, "frames": FRAMES, "temporal": 1},
    "train": {"global_batch": 8, "micro_batch": 8, "evaluate_every": 0},
    "adamw.lr": 5e-3,
    "cosine.warmup": 10,
    "log.every": 50,
    "checkpoint.every": 0,
}
CROSS = {"cross_attention.layers": [0, 1], "cross_attention.gate": 0.5}
extended = pytest.mark.extended
CASES = [
    pytest.param("cross_attention", {"train.sequence": 20, **CROSS}, 150, id="cross_attention"),
    pytest.param("prefix", {"train.sequence": 32}, 400, id="prefix", marks=extended),
    pytest.param("mot", {"train.sequence": 32}, 400, id="mot", marks=extended),
    pytest.param("moma", {"train.sequence": 32, "moe.experts": 6}, 400, id="moma", marks=extended),
]


def frames(draw: np.random.Generator, colour: str, sign: str) -> list[NDArray[np.uint8]]:
    """A bar on noise, upright unless `sign` is a dash. One that moves comes in again where it left, so that no frame
    alone tells the direction."""
    noise, count = draw.integers(190, 256, (SIDE, SIDE, 3), np.uint8), FRAMES if sign in MOVES else 1
    step = MOVES.get(sign, 0)
    at = draw.integers(SIDE - 2 - abs(step) * (count - 1)) - min(step * (count - 1), 0)
    found = []
    for number in range(count):
        one, where = noise.copy(), at + number * step + np.arange(3)
        one[where if sign == "-" else slice(None), slice(None) if sign == "-" else where] = COLOURS[colour]
        found.append(one)
    return found


def write(file: Path, shown: list[NDArray[np.uint8]]) -> None:
    if file.suffix == ".png":
        pillow.fromarray(shown[0]).save(file)
        return
    with av.open(str(file), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=4)
        stream.width = stream.height = SIDE
        stream.pix_fmt, stream.bit_rate = "yuv420p", 1_000_000
        for one in shown:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(one, format="rgb24")))
        container.mux(stream.encode())


def drawn(folder: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Records of pictures and clips, by turns; and of clips the first frame for as long, in `still`."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(count):
        colour, kind = draw.choice([*COLOURS]), ("image", "video")[number % 2]
        sign = draw.choice(["-", "|"] if kind == "image" else ["<", ">"])
        file, shown = folder / f"{seed}-{number}.{'png' if kind == 'image' else 'mp4'}", frames(draw, colour, sign)
        still = file.with_stem(f"still-{file.stem}")
        for one, of in ((file, shown), (still, shown[:1] * len(shown))):
            write(one, of)
        found.append({"text": f"<{kind}>{colour}{sign}", f"{kind}s": [str(file)], "still": [str(still)]})
    return found


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures and clips to learn from, in `train.jsonl`, and others in `asked.jsonl`."""
    folder = tmp_path_factory.mktemp("seen")
    for name, count, seed in (("train", 800, 0), ("asked", ASKED, 1)):
        lines = (json.dumps(one) + "\n" for one in drawn(folder, count, seed))
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("fusion", "options", "steps"), CASES)
def test_learns(fusion: str, options: dict[str, Any], steps: int, desk: Path, tmp_path: Path) -> None:
    settings = {**MODEL, **options, "multimodal.path": str(desk / "train.jsonl"), "multimodal.cache": str(tmp_path)}
    plugins = ["multimodal", "image", "video", fusion, *(["moe"] if fusion == "moma" else [])]
    run = run_forge(plugins, settings, preset="", steps=steps, without=["text"], folder=tmp_path / "runs").run
    model, right, still = open_model(run, device="cpu"), Counter[str](), 0
    for line in (desk / "asked.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        kind = "image" if "images" in record else "video"
        told = model.generate(items={kind: record[f"{kind}s"]}, tokens=2, temperature=0)
        right[kind] += record["text"] == f"<{kind}>{told}"
        if kind == "video":
            told = model.generate(items={kind: record["still"]}, tokens=2, temperature=0)
            still += record["text"] == f"<{kind}>{told}"
    half = ASKED // 2
    assert min(right["image"], right["video"]) >= half - 1, right
    assert still <= 0.75 * half, "one frame was enough"

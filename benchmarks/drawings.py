"""Draws pictures and clips with captions, for models that learn to see.

Some combinations of what a caption says are kept from training: no right answer about them was ever read.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIDE, FRAMES = 32, 4
COLOURS = {
    "red": "#d03030",
    "green": "#30a040",
    "blue": "#4050d0",
    "yellow": "#e0b020",
    "purple": "#a040b0",
    "black": "#202020",
}
SHAPES = ("circle", "square", "triangle")
COUNTS = ("one", "two", "three", "four")
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
STILL = 1 / 3
"""Most captions that the first frame of a clip can tell: of 16 cells, 12 are starts of each of the four directions."""
OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}

Frames = list[Image.Image]
Drawn = Callable[[random.Random], Frames]


def shape(image: Image.Image, name: str, colour: str, at: tuple[float, float], size: float) -> None:
    canvas, (x, y), fill = ImageDraw.Draw(image), at, COLOURS[colour]
    box = (x - size, y - size, x + size, y + size)
    if name == "circle":
        canvas.ellipse(box, fill=fill)
    elif name == "square":
        canvas.rectangle(box, fill=fill)
    else:
        canvas.polygon([(x, y - size), (x - size, y + size), (x + size, y + size)], fill=fill)


def shapes(draw: random.Random, name: str, colour: str, count: int) -> Frames:
    """Some shapes of a kind."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    for at in draw.sample([*product((8, 24), repeat=2)], count):
        shape(image, name, colour, (at[0] + draw.uniform(-1, 1), at[1] + draw.uniform(-1, 1)), draw.uniform(4, 6.5))
    return [image]


def digit(draw: random.Random, colour: str, number: int) -> Frames:
    """A digit near the middle, a little turned."""
    ink = Image.new("L", (SIDE, SIDE))
    at = (SIDE / 2 + draw.uniform(-2, 2), SIDE / 2 + draw.uniform(-2, 2))
    font = ImageFont.load_default(draw.uniform(21, 25))
    ImageDraw.Draw(ink).text(at, str(number), fill=255, font=font, anchor="mm")
    ink = ink.rotate(draw.uniform(-5, 5), Image.Resampling.BILINEAR)
    white, full = (Image.new("RGB", ink.size, one) for one in ("white", COLOURS[colour]))
    return [Image.composite(full, white, ink)]


def moving(draw: random.Random, colour: str, name: str, move: str) -> Frames:
    """A shape that moves from one of 4 × 4 cells to the next, each as likely."""
    cells = [*product(range(4), repeat=2)]
    start, end = draw.choice([(one, two) for one in cells if (two := _next(one, move)) in cells])
    size, off, found = draw.uniform(3, 4), [draw.uniform(-0.5, 0.5) for _ in "xy"], []
    for number in range(FRAMES):
        image, far = Image.new("RGB", (SIDE, SIDE), "white"), number / (FRAMES - 1)
        x, y = (4 + 8 * (one + far * (two - one)) + by for one, two, by in zip(start, end, off, strict=True))
        shape(image, name, colour, (x, y), size)
        found.append(image)
    return found


def _next(cell: tuple[int, ...], move: str) -> tuple[int, ...]:
    return tuple(one + step for one, step in zip(cell, MOVES[move], strict=True))


def every(kind: str) -> tuple[list[tuple[str, Drawn]], list[tuple[str, Drawn]]]:
    """Captions with what draws them: those to train on, and the sixth that is kept; each word is in both."""
    found: list[tuple[int, str, Drawn]] = []
    if kind == "image":
        for at, (name, colour, count) in _numbered(SHAPES, [*COLOURS], range(1, 5)):
            caption = f"{COUNTS[count - 1]} {colour} {name}{'s' if count > 1 else ''}"
            found.append((at, caption, lambda draw, a=name, b=colour, c=count: shapes(draw, a, b, c)))
        for at, (colour, number) in _numbered([*COLOURS], range(10)):
            found.append((at, f"a {colour} {number}", lambda draw, a=colour, b=number: digit(draw, a, b)))
    else:
        for at, (colour, name, move) in _numbered([*COLOURS], SHAPES, [*MOVES]):
            caption = f"{colour} {name} {move}"
            found.append((at, caption, lambda draw, a=colour, b=name, c=move: moving(draw, a, b, c)))
    return [one[1:] for one in found if one[0] % 6], [one[1:] for one in found if one[0] % 6 == 0]


def _numbered(*values: Sequence[Any]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    for places in product(*(range(len(one)) for one in values)):
        yield sum(places), tuple(one[at] for one, at in zip(values, places, strict=True))


def save(frames: Frames, file: Path) -> None:
    if file.suffix == ".png":
        frames[0].save(file)
        return
    import av

    with av.open(str(file), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=FRAMES)
        stream.width = stream.height = SIDE
        stream.pix_fmt, stream.bit_rate = "yuv420p", 2_000_000
        for one in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(one)))
        container.mux(stream.encode())


class Desk:
    """A folder of files, with records to train on (`train.jsonl`) and questions (`tasks.toml`).

    Args:
        kind: `image` or `video`.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind, self.count, self.draw = folder, kind, 0, random.Random(0)
        (folder / "files").mkdir(parents=True)

    def record(self, caption: str, frames: Frames) -> dict[str, Any]:
        name = f"files/{self.count}.{'png' if self.kind == 'image' else 'mp4'}"
        save(frames, self.folder / name)
        self.count += 1
        text = f"<{self.kind}>{caption}"
        return {"text": text, "prompt": f"<{self.kind}>", "answer": caption, f"{self.kind}s": [name]}

    def write(self, name: str, records: list[dict[str, Any]]) -> None:
        lines = (json.dumps(one) + "\n" for one in records)
        (self.folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    def fill(self, trained: int, asked: int) -> None:
        """Draw records and questions.

        The questions: `new`, of combinations that were trained on; `unseen`, of those that were not; `other`, those of
        `new` with the item of the next. Of clips also `still`, whose first frame is all there is, and `reversed`, which
        run backwards and then show a combination that was trained on.
        """
        made, kept = every(self.kind)
        items = f'items = {{ {self.kind} = "{self.kind}s" }}'
        chosen = [self.draw.choice(made) for _ in range(trained + asked)]
        drawn = [(caption, draws(self.draw)) for caption, draws in chosen[trained:]]
        self.write("train", [self.record(caption, draws(self.draw)) for caption, draws in chosen[:trained]])
        new = [self.record(*one) for one in drawn]
        unseen = [self.draw.choice(kept) for _ in range(asked)]
        of = f"{self.kind}s"
        questions = {
            "new": new,
            "unseen": [self.record(caption, draws(self.draw)) for caption, draws in unseen],
            "other": [{**one, of: two[of]} for one, two in zip(new, [*new[1:], new[0]], strict=True)],
        }
        if self.kind == "video":
            questions["still"] = [self.record(caption, frames[:1] * FRAMES) for caption, frames in drawn]
            known = {caption for caption, _ in made}
            questions["reversed"] = [
                self.record(back, frames[::-1]) for caption, frames in drawn if (back := turned(caption)) in known
            ]
        tables = []
        for name, records in questions.items():
            self.write(name, records)
            table = f'kind = "generate"\ndata = "{name}.jsonl"\nprompt = "{{prompt}}"\n{items}\ntokens = 32\n'
            tables.append(f"[{name}]\n{table}")
        (self.folder / "tasks.toml").write_text("\n".join(tables), encoding="utf-8")


def turned(caption: str) -> str:
    """What a clip shows that runs backwards."""
    *words, move = caption.split()
    return " ".join([*words, OPPOSITE[move]])

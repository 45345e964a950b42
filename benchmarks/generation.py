"""Rows that are generated side by side, beside `transformers.generate` and beside one row after the other.

python benchmarks/generation.py    writes benchmarks/results/generation.md

All are given the same weights and the same prompts, and take the likeliest token. Each way is measured in turns, by CPU
seconds of this process, of which the least counts.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from attention import seconds
from huggingface import SPOKEN, TINY, write_model
from run import Row, table
from torch import Tensor, nn

from forge_train_kit.model import Slots
from forge_train_tools.generation.engine import follow, run
from forge_train_tools.generation.packed import packed
from forge_train_tools.generation.sampling import likeliest
from forge_train_tools.offline.opening import Opened, open_model

RESULTS = Path(__file__).parent / "results" / "generation.md"
SHAPES = {"2 layers of 64": TINY, "6 layers of 256": SPOKEN}
PROMPTS, LONGEST, TOKENS, MANY, TURNS = 8, 40, 128, 32, 8


@dataclass
class Likeliest:
    """A request that takes the likeliest token."""

    number: int
    ids: list[int]
    most: int
    prompt: int = 0
    done: bool = False

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)

    def choose(self, logits: Tensor) -> int:
        return likeliest(logits)

    def add(self, token: int) -> None:
        self.ids.append(token)
        self.done = len(self.ids) == self.prompt + self.most


def requests(count: int, *, even: bool = True) -> Iterator[Likeliest]:
    """Prompts of several lengths; answers of one length, or of lengths from an eighth of it on."""
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(1, 250, (LONGEST - 5 * (number % 4),), generator=generator).tolist()
        share = 8 if even else 1 + (5 * number) % 8
        yield Likeliest(number, ids, TOKENS * share // 8)


def side_by_side(opened: Opened, count: int, *, even: bool = True) -> list[list[int]]:
    rows = run(opened.job, opened.model, requests(count, even=even), slots=PROMPTS)  # type: ignore[arg-type]
    return [row.ids for row in sorted(rows, key=lambda row: row.number)]


def in_turn(opened: Opened, count: int) -> list[list[int]]:
    """One row after the other, each with a cache of its own."""
    found = []
    for row in requests(count):
        for _ in follow(opened.job, opened.model, row):  # type: ignore[type-var]
            pass
        found.append(row.ids)
    return found


@torch.no_grad()
def by_transformers(theirs: Any, count: int, *, even: bool = True) -> list[list[int]]:
    """Batches of eight, padded on the left; each ends with its longest answer."""
    found = []
    rows = list(requests(count, even=even))
    for batch in (rows[start : start + PROMPTS] for start in range(0, count, PROMPTS)):
        ids = torch.tensor([[0] * (LONGEST - row.prompt) + row.ids for row in batch])
        seen = torch.tensor([[0] * (LONGEST - row.prompt) + [1] * row.prompt for row in batch])
        most = max(row.most for row in batch)
        out = theirs.generate(ids, attention_mask=seen, max_new_tokens=most, do_sample=False, pad_token_id=0)
        found += [one[LONGEST - row.prompt : LONGEST + row.most].tolist() for row, one in zip(batch, out, strict=True)]
    return found


@torch.inference_mode()
def bare(opened: Opened) -> None:
    """The products and the attention of all steps after the prompts, and nothing else: no norm, no cache, no choice."""
    part: Any = opened.model.parts[0]
    attention = part.layers["0"].attention
    keys = torch.randn(PROMPTS, LONGEST + TOKENS + 16, attention.kv_heads, attention.head_dim).transpose(1, 2)
    query = torch.randn(PROMPTS, attention.heads, 1, attention.head_dim)
    layers = [one for one in part.modules() if isinstance(one, nn.Linear)]
    inputs = [torch.randn(PROMPTS, 1, one.in_features) for one in layers]
    with packed([part]):
        for length in range(LONGEST + 1, LONGEST + TOKENS):
            columns = -(-length // 16) * 16
            mask = torch.zeros(PROMPTS, 1, 1, columns)
            some = keys[:, :, :columns]
            for one, x in zip(layers, inputs, strict=True):
                one.forward(x)
            for _ in part.layers:
                F.scaled_dot_product_attention(query, some, some, attn_mask=mask, enable_gqa=True)


def held(opened: Opened) -> tuple[int, int]:
    """Bytes of the caches of eight rows of 168 tokens, and of their formula."""
    part: Any = opened.model.parts[0]
    slots = Slots(PROMPTS, LONGEST + TOKENS, opened.job.device, joint=True)
    caches = part.new_slots(slots)
    slots.begin(0, 1)
    with torch.no_grad():
        part(torch.tensor([[1]]), position_ids=torch.tensor([[0]]), cache=caches)
    heads, features = part.layers["0"].attention.kv_heads, part.layers["0"].attention.head_dim
    formula = 2 * len(caches) * heads * features * (LONGEST + TOKENS) * PROMPTS * 4
    return sum(one.nbytes for cache in caches.values() for one in cache._held), formula


def measured(name: str, folder: Path) -> Iterator[Row]:
    from transformers import AutoModelForCausalLM

    opened, theirs = open_model(folder, device="cpu", text=False), AutoModelForCausalLM.from_pretrained(folder).eval()
    wanted = by_transformers(theirs, PROMPTS)
    same = side_by_side(opened, PROMPTS) == wanted == in_turn(opened, PROMPTS)
    yield Row(f"{name}: the answers are those of transformers", "yes" if same else "no", "yes", same)
    work: dict[str, Callable[[], Any]] = {
        "ours": partial(side_by_side, opened, PROMPTS),
        "turns": partial(in_turn, opened, PROMPTS),
        "theirs": partial(by_transformers, theirs, PROMPTS),
        "bare": partial(bare, opened),
        "many": partial(side_by_side, opened, MANY, even=False),
        "their many": partial(by_transformers, theirs, MANY, even=False),
    }
    taken = seconds(work, TURNS)
    rows = (
        (f"{PROMPTS} prompts, {TOKENS} tokens each: one after the other", "turns", "ours", 4.0),
        (f"{PROMPTS} prompts, {TOKENS} tokens each: transformers", "theirs", "ours", 2.0),
        ("the same, against products and attention of our steps alone", "theirs", "bare", 2.0),
        (
            f"{MANY} prompts, {TOKENS // 8} to {TOKENS} tokens, {PROMPTS} at once: transformers",
            "their many",
            "many",
            2.0,
        ),
    )
    for what, other, mine, bar in rows:
        ratio = taken[other] / taken[mine]
        text = f"{taken[other]:.3g} s against {taken[mine]:.3g} s: × {ratio:.2f}"
        yield Row(f"{name}: {what}", text, f"× {bar:g}", ratio >= bar)
    bytes_, formula = held(opened)
    yield Row(f"{name}: keys and values", f"{bytes_ / formula:.3f} of the formula", "1.1", bytes_ <= 1.1 * formula)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), **shape)
            for row in measured(name, Path(folder)):
                rows.append(row)
                print(row, flush=True)
    note = (
        "A random Llama in fp32 on one thread: transformers' class from a folder, and ours from the same folder. "
        f"Prompts have {LONGEST - 15} to {LONGEST} tokens; both take the likeliest token. transformers pads a batch, "
        "and computes it until its longest answer ends. CPU seconds, other against ours."
    )
    RESULTS.write_text(table(rows, "Generation", "python benchmarks/generation.py", note), encoding="utf-8")


if __name__ == "__main__":
    main()

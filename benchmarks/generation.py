"""Rows that are generated side by side, beside `transformers.generate` and beside one row after the other.

python benchmarks/generation.py [RUN]   writes benchmarks/results/generation.md

All are given the same weights and the same prompts, and take the likeliest token. Each way is measured in turns, by CPU
seconds of this process, of which the least counts.

Guesses from the text itself are measured with a trained model, too: RUN, one that an earlier call left, or one that
learns Python's standard library first, without the files that the prompts are taken from.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import answers
import torch
import torch.nn.functional as F
from attention import seconds
from huggingface import SPOKEN, TINY, write_model
from run import Row, table
from torch import Tensor, nn

from forge_train_kit import hookspecs
from forge_train_kit.model import Slots
from forge_train_tools import train
from forge_train_tools.generation.drafts import Drafts
from forge_train_tools.generation.engine import follow, run
from forge_train_tools.generation.packed import packed
from forge_train_tools.generation.rows import Choice, TextRow
from forge_train_tools.generation.sampling import Sampling, likeliest
from forge_train_tools.offline.opening import Opened, open_model

RESULTS = Path(__file__).parent / "results" / "generation.md"
SHAPES = {"2 layers of 64": TINY, "6 layers of 256": SPOKEN}
PROMPTS, LONGEST, TOKENS, MANY, TURNS = 8, 40, 128, 32, 8
LOOKUP = 8
STEPS, HELD, PLACE, CODE = 300, "t*.py", 1200, 120
"""Steps of the trained model, files that it does not see, and where prompts of these begin and their tokens."""


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

    def choose(self, logits: Tensor) -> Choice:
        return Choice(likeliest(logits))

    def add(self, choice: Choice) -> None:
        self.ids.append(choice.id)
        self.done = len(self.ids) == self.prompt + self.most


def requests(count: int, *, even: bool = True) -> Iterator[Likeliest]:
    """Prompts of several lengths; answers of one length, or of lengths from an eighth of it on."""
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(1, 250, (LONGEST - 5 * (number % 4),), generator=generator).tolist()
        share = 8 if even else 1 + (5 * number) % 8
        yield Likeliest(number, ids, TOKENS * share // 8)


def side_by_side(opened: Opened, count: int, *, even: bool = True, drafts: Drafts | None = None) -> list[list[int]]:
    rows = run(opened.job, opened.model, requests(count, even=even), slots=PROMPTS, drafts=drafts)
    return [row.ids for row in sorted(rows, key=lambda row: row.number)]


def looked_up(opened: Opened, count: int, *, even: bool = True) -> tuple[list[list[int]], Drafts]:
    """The same, with guesses from the texts."""
    drafts = Drafts(lookup=LOOKUP)
    return side_by_side(opened, count, even=even, drafts=drafts), drafts


def in_turn(opened: Opened, count: int) -> list[list[int]]:
    """One row after the other, each with a cache of its own."""
    found = []
    for row in requests(count):
        for _ in follow(opened.job, opened.model, row):
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
    found, drafts = looked_up(opened, PROMPTS)
    same = side_by_side(opened, PROMPTS) == wanted == in_turn(opened, PROMPTS) == found
    yield Row(f"{name}: the answers are those of transformers", "yes" if same else "no", "yes", same)
    work: dict[str, Callable[[], Any]] = {
        "ours": partial(side_by_side, opened, PROMPTS),
        "turns": partial(in_turn, opened, PROMPTS),
        "theirs": partial(by_transformers, theirs, PROMPTS),
        "bare": partial(bare, opened),
        "guessed": partial(looked_up, opened, PROMPTS),
        "many": partial(side_by_side, opened, MANY, even=False),
        "many guessed": partial(looked_up, opened, MANY, even=False),
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
        (f"{PROMPTS} prompts with --lookup {LOOKUP}, {drafts}: without", "ours", "guessed", 0.0),
        (f"{PROMPTS} prompts with --lookup {LOOKUP}: transformers", "theirs", "guessed", 2.0),
        (f"{MANY} prompts with --lookup {LOOKUP}: without", "many", "many guessed", 0.0),
    )
    for what, other, mine, bar in rows:
        ratio = taken[other] / taken[mine]
        text = f"{taken[other]:.3g} s against {taken[mine]:.3g} s: × {ratio:.2f}"
        yield Row(f"{name}: {what}", text, f"× {bar:g}" if bar else "", ratio >= bar)
    bytes_, formula = held(opened)
    yield Row(f"{name}: keys and values", f"{bytes_ / formula:.3f} of the formula", "1.1", bytes_ <= 1.1 * formula)


def trained(folder: Path) -> Path:
    """A run that learned the sources, but those that are held out."""
    seen = [file for file in answers.files() if not file.match(HELD)]
    values = {
        "text.path": str(answers.text(folder, seen)),
        "text.cache": str(folder / "cache"),
        "tokenizer.path": str(answers.tokenizer(folder / "tokenizer", seen)),
        "decoder": {"dim": answers.DIM, "layers": answers.LAYERS, "heads": 4},
        "train": {"steps": STEPS, "global_batch": 8, "sequence": answers.TOKENS, "evaluate_every": 0},
    }
    return train("quickstart", values, name="base", run_dir=folder).path


def continued(opened: Opened, temperature: float, count: int, lookup: int = 0) -> tuple[list[list[int]], Drafts]:
    """Go on with code that the model has not seen; a single prompt as a chat has it, by itself."""
    tokenizer, drafts, rows = hookspecs.tokenizer(opened.job), Drafts(lookup=lookup), list[TextRow]()
    sampling = Sampling(tokens=TOKENS, temperature=temperature)
    held = sorted((file for file in answers.files() if file.match(HELD)), key=lambda file: -file.stat().st_size)
    for number, file in enumerate(held[:count]):
        ids = [*tokenizer.begin, *tokenizer.encode(file.read_text(encoding="utf-8"))[PLACE : PLACE + CODE]]
        rows.append(TextRow(number, ids, sampling, tokenizer, request=(number, 0)))
    if count == 1:
        for _ in follow(opened.job, opened.model, rows[0], drafts):
            pass
    else:
        list(run(opened.job, opened.model, iter(rows), slots=PROMPTS, drafts=drafts))
    return [row.ids for row in rows], drafts


def on_code(path: Path) -> Iterator[Row]:
    """A trained model with guesses from the text against itself without."""
    opened = open_model(path, device="cpu", text=False)
    for temperature, how in ((0.0, "the likeliest token"), (0.8, "drawn at 0.8")):
        for count in (PROMPTS, 1):
            (plain, _), (ids, drafts) = (continued(opened, temperature, count, one) for one in (0, LOOKUP))
            taken = seconds(
                {
                    "without": partial(continued, opened, temperature, count),
                    "with": partial(continued, opened, temperature, count, LOOKUP),
                },
                TURNS,
            )
            text = f"{taken['without']:.3g} s against {taken['with']:.3g} s: × {taken['without'] / taken['with']:.2f}"
            prompts = f"{count} prompt{'s' if count > 1 else ''}"
            what = f"trained on code: {prompts}, {how}, with --lookup {LOOKUP}, {drafts}: without"
            yield Row(what, text, "the same answers", ids == plain)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), **shape)
            for row in measured(name, Path(folder)):
                rows.append(row)
                print(row, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in on_code(Path(sys.argv[1]) if sys.argv[1:] else trained(Path(folder))):
            rows.append(row)
            print(row, flush=True)
    note = (
        "A random Llama in fp32 on one thread: transformers' class from a folder, and ours from the same folder. "
        f"Prompts have {LONGEST - 15} to {LONGEST} tokens; both take the likeliest token. transformers pads a batch, "
        f"and computes it until its longest answer ends. CPU seconds, other against ours, "
        f"the least of {TURNS} turns.\n\n"
        f"`--lookup {LOOKUP}` guesses from the text. Random weights soon repeat themselves: with text it gains less. "
        "`transformers` guesses so for a single prompt only, and is measured without. The trained model has "
        f"{answers.LAYERS} layers of {answers.DIM} and {STEPS} steps on Python's library; it continues {CODE} tokens "
        "of each of eight files that it has not seen. With the likeliest tokens it soon repeats itself, too. Prompts "
        "side by side take as many forwards as the slowest of them."
    )
    RESULTS.write_text(table(rows, "Generation", "python benchmarks/generation.py", note), encoding="utf-8")


if __name__ == "__main__":
    main()

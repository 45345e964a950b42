"""What `test_rows_on_layouts.py` has ranks do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from forge_train import ConfigError, ForgeError
from forge_train.compose.compose import compose
from forge_train_kit.data.items import ItemPrompts
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.generation import drafting
from forge_train_tools.generation.completion import Completion
from forge_train_tools.generation.drafts import Drafts, drafts_of
from forge_train_tools.generation.engine import run
from forge_train_tools.generation.sampling import Sampling
from forge_train_tools.launching.world import here
from forge_train_tools.offline.read_only import ReadOnlyRun
from forge_train_tools.process import prepared
from generation_rows import Found, Greedy, requests, told

MODEL = (
    *("decoder.dim=32", "decoder.layers=4", "decoder.heads=4", "decoder.kv_heads=2", "decoder.hidden=48"),
    *("decoder.max_sequence=64", "decoder.std=0.05", "run.device=cpu", "train.steps=3", "train.global_batch=8"),
    *("train.micro_batch=2", "train.sequence=32"),
)


class Failing(Greedy):
    """Can't choose its second token."""

    def choose(self, logits: torch.Tensor) -> Found:
        if len(self.ids) > self.prompt:
            raise ForgeError(f"request {self.number} fails")
        return super().choose(logits)


def rows(plugins: Sequence[str], values: Sequence[str], slots: int, count: int, failing: int = -1) -> Any:
    """Generate on initial weights; the rows in the order in which they came, and what is left gathered."""
    request = Request(plugins=tuple(plugins), without=("console", "tensorboard"), set=(*MODEL, *values))
    with prepared(resolve(request, world=here().size), ReadOnlyRun(Path("nowhere"))) as job:
        model = compose(job).model
        asked = requests(count)
        if failing >= 0:
            asked[failing] = Failing(failing, asked[failing].ids, 5)
        model.train()
        try:
            found = told(run(job, model, iter(asked), slots=slots))
        except ForgeError as error:
            return str(error)
        assert all(one.training for _, one in model.named_modules() if isinstance(one, nn.Linear))
        return found


def looked_up(plugins: Sequence[str], values: Sequence[str], slots: int, count: int) -> Any:
    """Rows as in `rows`, then the same with guesses from their texts and how many these were; or why there are none."""
    request = Request(plugins=tuple(plugins), without=("console", "tensorboard"), set=(*MODEL, *values))
    with prepared(resolve(request, world=here().size), ReadOnlyRun(Path("nowhere"))) as job:
        model = compose(job).model
        plain = told(run(job, model, iter(requests(count)), slots=slots))
        try:
            drafts = drafts_of(job, model, Sampling(lookup=4))
        except ConfigError as error:
            return plain, str(error), (0, 0)
        found = told(run(job, model, iter(requests(count)), slots=slots, drafts=drafts))
        return plain, found, (drafts.proposed, drafts.accepted)


def with_items(plugins: Sequence[str], values: Sequence[str], folder: str, slots: int) -> Any:
    """Rows of prompts with and without scans, as in `rows`."""
    request = Request(plugins=("items_data:Scans", *plugins), without=("console", "tensorboard"), set=(*MODEL, *values))
    with prepared(resolve(request, world=here().size), ReadOnlyRun(Path("nowhere"))) as job:
        model = compose(job).model
        prompts = ItemPrompts(job)
        asked = []
        for number, files in enumerate((["0.npy"], [], ["1.npy", "2.npy"], [], ["2.npy"])):
            text = "<scan>is " * len(files) or "no scan"
            ids, items = prompts.place(prompts.tokenizer.encode(text), {"scan": files}, "a prompt", folder)
            row = Greedy(number, ids, 5)
            row.items = items  # type: ignore[attr-defined]
            asked.append(row)
        return told(run(job, model, iter(asked), slots=slots))


def drafted(plugins: Sequence[str], values: Sequence[str], slots: int, count: int, drafts: int) -> Any:
    """Rows as in `rows` with drafts, and the guesses that this rank's modules made after its rows' tokens."""
    request = Request(plugins=tuple(plugins), without=("console", "tensorboard"), set=(*MODEL, *values))
    with prepared(resolve(request, world=here().size), ReadOnlyRun(Path("nowhere"))) as job:
        model = compose(job).model
        drafting.check(job, model, drafts)
        told_ = Drafts(drafts)
        guesses: list[tuple[list[int], list[int]]] = []
        guess = drafting.ModuleGuesser._guessed

        def kept(self: drafting.ModuleGuesser, rows: Sequence[Sequence[int]]) -> list[list[int]]:
            found = guess(self, rows)
            guesses.extend(([*ids], [*some]) for ids, some in zip(rows, found, strict=True))
            return found

        with patch.object(drafting.ModuleGuesser, "_guessed", kept):
            found = told(run(job, model, iter(requests(count)), slots=slots, drafts=told_))
        return found, guesses, (told_.proposed, told_.accepted)


def text(plugins: Sequence[str], values: Sequence[str]) -> tuple[str, int]:
    """Continue a text on initial weights, and count the pieces."""
    request = Request(plugins=tuple(plugins), without=("console", "tensorboard"), set=(*MODEL, *values))
    with prepared(resolve(request, world=here().size), ReadOnlyRun(Path("nowhere"))) as job:
        pieces = list(Completion(job, compose(job).model, "the ", Sampling(tokens=16, temperature=0)))
        return "".join(pieces), len(pieces)

"""The text of `forge debug look`, and the items in it, as the model reads them."""

from __future__ import annotations

from pathlib import Path

import torch

from forge_train.base.errors import ConfigError
from forge_train.contract.batch import MASKED, Batch
from forge_train.plugin.job import Job
from forge_train_kit.data.inspection.samples import texts_of
from forge_train_kit.data.items import RowItems, item_axes, padded
from forge_train_kit.tokenizer import Tokenizer

from ..generation.completion import items_of
from .asked import Looking, encoded


class Text:
    """A text as tokens, with items at their positions.

    Args:
        asked: names it.
        job: of the model.
        tokenizer: of the model.
        longest: tokens that the model reads at once; None for any number.

    Raises:
        ConfigError: it has no token or too many, or an item can't be read.
    """

    def __init__(self, asked: Looking, job: Job, tokenizer: Tokenizer, longest: int | None) -> None:
        self._rows: dict[str, RowItems] = {}
        self.items = 0
        """Number of items in it."""
        prompts, runs = items_of(job, asked.items), dict[int, str]()
        if prompts is None:
            self.ids = encoded(asked.text, tokenizer)
        else:
            marked = encoded(prompts.with_placeholders(asked.text, asked.items), prompts.tokenizer)
            self.ids, found = prompts.place(marked, asked.items, "--text", str(Path.cwd()))
            self._rows, self.items = found.read(len(self.ids)), len(found.placed)
            for _, one, at in found.placed:
                runs |= {at + start: prompts.fields.modalities[one.modality].placeholder for start, *_ in one.stretches}
        if longest is not None and len(self.ids) > longest:
            raise ConfigError(
                f"--text: has {len(self.ids):,} tokens, and the model reads {longest:,} at once; shorten it."
            )
        self.of_items = torch.zeros(len(self.ids), dtype=torch.bool)
        """`[tokens]`, true at positions of items."""
        self.words = [text for text, _ in texts_of(tokenizer, self.ids)]
        """The text of each token, and a label of each position of an item."""
        for name, row in self._rows.items():
            self.of_items |= torch.from_numpy(row.places >= 0)
            for at in (row.places >= 0).nonzero()[0].tolist():
                self.words[at] = f"<{name}>[{row.places[at]}]"
        kept = (runs.get(at, "" if self.of_items[at] else text) for at, text in enumerate(self.words))
        self.whole = "".join(kept)
        """All of it, with a placeholder for each item."""

    def batch(self, job: Job) -> Batch:
        """The text as a batch of which every token is learned, prepared as in training."""
        inputs = torch.tensor([self.ids])
        labels = inputs.masked_fill(self.of_items, MASKED).roll(-1, 1)
        labels[0, -1] = MASKED
        extras = {name: torch.from_numpy(one) for name, one in padded([self._rows]).items()} if self._rows else {}
        axes = item_axes([self._rows]) if self._rows else {}
        (prepared,) = job.hooks.prepare_batch()([Batch(inputs, labels, extras=extras, axes=axes)], 0)
        return prepared.to(job.device)

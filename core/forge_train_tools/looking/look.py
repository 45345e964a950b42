"""`forge debug look`: norms of the residual stream, attention maps and the logit lens of one text."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from forge_train.base.errors import ConfigError
from forge_train.compose.initialise import allocate
from forge_train.contract.batch import Batch
from forge_train.contract.model import Model
from forge_train.mesh.layout import Layout
from forge_train.plugin import hookspecs
from forge_train.plugin.job import Job
from forge_train_kit.activations import Interventions, layers_of
from forge_train_kit.data.inspection.samples import texts_of
from forge_train_kit.hookspecs import tokenizer as tokenizer_of
from forge_train_kit.tokenizer import Tokenizer

from ..launching.once import launch_once
from ..offline.logits import logits_of
from ..offline.opening import Source, compose_meta, lone_job
from . import layout
from .asked import Looking, chosen, head_count
from .found import BEFORE, Lens, Looked, lens_rows
from .text import Text
from .watch import Watch, why_without

__all__ = ["Lens", "Looked", "Looking", "look"]


class _Reading:
    """A text and a model that is to read it, without memory.

    Raises:
        ConfigError: for a text or a head that can't be.
    """

    def __init__(self, asked: Looking, source: Source) -> None:
        self.source = source
        self.job = lone_job(source.setup, source.path)
        if not self.job.hooks.provider("tokenizer"):
            raise ConfigError(f"{asked.path}: this model has no tokenizer, which a text needs.")
        self.model = compose_meta(self.job, text=True)
        (self.part,) = self.model.parts
        self.heads = chosen(self.part, asked.heads)
        self.tokenizer = tokenizer_of(self.job)
        self.text = Text(asked, self.job, self.tokenizer, getattr(self.part, "max_sequence", None))
        self.ids = self.text.ids
        given = self.job.hooks.gives("head")
        self.no_lens = "" if given == "token_logits" else f"The head gives {given!r}, and not token logits."

    def looked(self, norms: Tensor, attention: Mapping[str, Tensor], lens: Sequence[Tensor], no_lens: str) -> Looked:
        """The findings.

        Args:
            norms: `[states, tokens]`.
            attention: layer → weights of its heads, `[heads, queries, keys]`.
            lens: `top`, `probability` and `rank`; empty without a lens.
            no_lens: the reason then.
        """
        layers, part = layers_of(self.part), self.part
        maps = {
            f"{layers.index(name)}.{head}": weights
            for name, found in attention.items()
            for head, weights in zip(self.heads[name], found, strict=True)
        }
        texts = [[_text(self.tokenizer, token) for token in row.tolist()] for row in lens[0]] if lens else []
        return Looked(
            checkpoint=str(self.source.path),
            step=self.source.step,
            ids=self.ids,
            text=self.text.whole,
            texts=self.text.words,
            states=[BEFORE, *layers],
            norms=norms,
            attention=maps,
            without={name: why_without(part.get_submodule(name)) for name in layers if not head_count(part, name)},
            lens=Lens(top=lens[0], probability=lens[1], rank=lens[2], texts=texts) if lens else None,
            no_lens=no_lens,
        )


def look(asked: Looking, *, nproc: int = 1) -> Looked:
    """Have a model read a text, and look into it.

    Args:
        asked: the model and the text.
        nproc: local processes to use, including this one.

    Raises:
        ConfigError: for a path, a text, a head or a layout that can't be, before anything is computed.
        ForgeError: with the message of the rank that failed first.
    """
    source = asked.source(nproc)
    Layout.of(source.setup.config.parallel, nproc)
    reading = _Reading(asked, source)
    if nproc > 1 and reading.text.items:
        raise ConfigError("--image, --item: a text with items is looked at on one process; leave out --nproc.")
    return _alone(reading) if nproc == 1 else _on_several(asked, reading, nproc)


def _on_several(asked: Looking, reading: _Reading, nproc: int) -> Looked:
    given = {"asked": asdict(asked) | {"path": str(asked.path)}, "ids": reading.ids, "heads": reading.heads}
    with tempfile.TemporaryDirectory(prefix="forge-") as folder:
        file = Path(folder) / "numbers.safetensors"
        launch_once(f"{layout.__name__}:worker", {**given, "lens": not reading.no_lens, "out": str(file)}, nproc)
        found = load_file(file)
    attention = {name: found[layout.ATTENTION + name] for name in reading.heads}
    lens = [found[name] for name in layout.LENS if name in found]
    return reading.looked(found[layout.NORMS], attention, lens, reading.no_lens)


def _alone(reading: _Reading) -> Looked:
    job, model, part = reading.job, reading.model, reading.part
    allocate(part, job.device)
    reading.source.load(model, job)
    model.train(False)
    edits = Interventions.of(model, job)
    with torch.no_grad(), edits.applied(), _watched(part, reading.heads) as watch:
        hidden = _read(job, model, reading.text.batch(job))
        lens = reading.no_lens or _lens(job, part, watch, hidden, reading.text)
    norms = torch.stack([torch.linalg.vector_norm(x[0].float(), dim=-1) for x in watch.states.values()]).cpu()
    attention = {name: found.float().cpu() for name, found in watch.attention.items()}
    no_lens = lens if isinstance(lens, str) else ""
    return reading.looked(norms, attention, [] if isinstance(lens, str) else lens, no_lens)


@contextmanager
def _watched(part: nn.Module, heads: Mapping[str, Sequence[int]]) -> Iterator[Watch]:
    watch = Watch(part, heads)
    try:
        yield watch
    finally:
        watch.close()


def _read(job: Job, model: Model, batch: Batch) -> Tensor:
    """The model's last hidden states, `[1, tokens, dim]`."""
    job.step.batch = batch
    try:
        hidden: Tensor = model(batch.inputs, **batch.model_inputs())
    finally:
        job.step.end()
    return hidden


def _lens(job: Job, part: nn.Module, watch: Watch, hidden: Tensor, text: Text) -> list[Tensor] | str:
    """The numbers of the lens, or why there are none."""
    states, behind = list(watch.states.values()), list(watch.behind)
    watch.close()
    finished = [_through(behind, one) for one in states]
    if not torch.allclose(finished[-1], hidden, rtol=1e-4, atol=1e-5):
        return f"{type(part).__name__} does something else than its modules between the last layer and the head."
    task, following = hookspecs.task(job), torch.tensor(text.ids[1:])
    rows = [lens_rows(logits_of(task, part, one, len(text.ids)), following) for one in finished]
    top, probability, rank = (torch.stack(column) for column in zip(*rows, strict=True))
    return [top, probability, rank.masked_fill(text.of_items[1:], 0)]


def _through(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def _text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token alone; empty for a part of a character, or a token that the tokenizer does not have."""
    if token >= tokenizer.vocabulary:
        return ""
    return next(text for text, _ in texts_of(tokenizer, [token]))

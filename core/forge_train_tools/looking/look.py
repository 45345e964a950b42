"""`forge debug look`: norms of the residual stream, attention maps and the logit lens of one text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forge_train.base.errors import ConfigError
from forge_train.compose.initialise import allocate
from forge_train.contract.batch import MASKED, Batch
from forge_train.contract.model import Model
from forge_train.plugin import hookspecs
from forge_train.plugin.job import Job
from forge_train_kit.activations import Interventions, layers_of
from forge_train_kit.activations.heads import kernel_of
from forge_train_kit.data.inspection.samples import texts_of
from forge_train_kit.hookspecs import tokenizer as tokenizer_of
from forge_train_kit.tokenizer import Tokenizer

from ..offline.logits import logits_of
from ..offline.opening import Wanted, compose_meta, find, lone_job
from .watch import Watch, why_without

USUAL_LAYERS, USUAL_HEADS = 3, 2
"""Layers, and heads of each, whose attention is shown without `--heads`."""
BEFORE = "embedding"
"""Name of the residual stream before the first layer."""


@dataclass(frozen=True, kw_only=True)
class Looking:
    """A request to look into a model.

    Args:
        path: a run, a checkpoint or a Hugging Face folder.
        text: to read.
        heads: `L.H` each, the number of a layer and of a head of it, or `L.*`; empty for a few.
        plugins: to enable too; so is `set`, values to override.
    """

    path: Path
    text: str
    heads: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    set: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lens:
    """The head applied to the residual stream after each layer, behind the final norm (nostalgebraist 2020)."""

    top: Tensor
    """The likeliest next token at each position, `[states, tokens]` int64."""
    probability: Tensor
    """Its probability, `[states, tokens]` fp32."""
    rank: Tensor
    """The place of the token that does follow, 1 for the likeliest; `[states, tokens - 1]` int64."""
    texts: list[list[str]]
    """The text of each of `top`."""


@dataclass(frozen=True)
class Looked:
    """Findings about one text."""

    checkpoint: str
    step: int
    ids: list[int]
    texts: list[str]
    """Of each token; empty for all but the last token of a character."""
    states: list[str]
    """Names of states of the residual stream: before the first layer, and after each."""
    norms: Tensor
    """2-norms, `[states, tokens]` fp32."""
    attention: dict[str, Tensor]
    """`L.H` → weights, `[queries, keys]` fp32."""
    without: dict[str, str]
    """Layer → why it has no attention maps."""
    lens: Lens | None
    no_lens: str = ""
    """The reason, if there is no lens."""

    def tensors(self) -> dict[str, Tensor]:
        """All numbers, by name."""
        found = {"input_ids": torch.tensor(self.ids), "norms": self.norms}
        found |= {f"attention.{name}": one for name, one in self.attention.items()}
        if self.lens is not None:
            own = {"top": self.lens.top, "probability": self.lens.probability, "rank": self.lens.rank}
            found |= {f"lens.{name}": one for name, one in own.items()}
        return found

    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        lens = None
        if self.lens is not None:
            numbers = {name: getattr(self.lens, name).tolist() for name in ("top", "probability", "rank")}
            lens = {**numbers, "texts": self.lens.texts}
        return {
            "checkpoint": self.checkpoint,
            "step": self.step,
            "tokens": [{"id": one, "text": text} for one, text in zip(self.ids, self.texts, strict=True)],
            "states": self.states,
            "norms": self.norms.tolist(),
            "attention": {name: one.tolist() for name, one in self.attention.items()},
            "without_attention": self.without,
            "lens": lens,
            "no_lens": self.no_lens,
        }


def look(asked: Looking) -> Looked:
    """Have a model read a text, on this process, and look into it.

    Raises:
        ConfigError: for a path, a text or a head that can't be.
    """
    source = find(asked.path, wanted=Wanted(asked.plugins, asked.set, data=False))
    job = lone_job(source.setup, source.path)
    if not job.hooks.provider("tokenizer"):
        raise ConfigError(f"{asked.path}: this model has no tokenizer, which a text needs.")
    model = compose_meta(job, text=True)
    (part,) = model.parts
    heads = chosen(part, asked.heads)
    tokenizer = tokenizer_of(job)
    ids = encoded(asked.text, tokenizer, getattr(part, "max_sequence", None))
    allocate(part, job.device)
    source.load(model, job)
    model.train(False)
    edits = Interventions.of(model, job)
    with torch.no_grad(), edits.applied(), _watched(part, heads) as watch:
        hidden = _read(job, model, ids)
        lens = _lens(job, part, watch, hidden, ids, tokenizer)
    layers = layers_of(part)
    attention = {
        f"{layers.index(name)}.{head}": weights.float().cpu()
        for name, found in watch.attention.items()
        for head, weights in zip(heads[name], found, strict=True)
    }
    states = list(watch.states.values())
    return Looked(
        checkpoint=str(source.path),
        step=source.step,
        ids=ids,
        texts=[text for text, _ in texts_of(tokenizer, ids)],
        states=[name or BEFORE for name in watch.states],
        norms=torch.stack([torch.linalg.vector_norm(x[0].float(), dim=-1) for x in states]).cpu(),
        attention=attention,
        without={name: why_without(part.get_submodule(name)) for name in layers if not _shows(part, name)},
        lens=lens if isinstance(lens, Lens) else None,
        no_lens="" if isinstance(lens, Lens) else lens,
    )


def encoded(text: str, tokenizer: Tokenizer, longest: int | None) -> list[int]:
    """A text as tokens, with the beginning of a document.

    Raises:
        ConfigError: if it has no token, or too many.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"--text: is not UTF-8 at character {error.start}; give it as UTF-8.") from error
    own = tokenizer.encode(text)
    if not own:
        raise ConfigError("--text: has no token; give a text to read.")
    begin = list(tokenizer.begin)
    ids = own if begin and own[: len(begin)] == begin else [*begin, *own]
    if longest is not None and len(ids) > longest:
        raise ConfigError(f"--text: has {len(ids):,} tokens, and the model reads {longest:,} at once; shorten it.")
    return ids


def chosen(part: nn.Module, asked: Sequence[str]) -> dict[str, list[int]]:
    """Layer → the heads to show.

    Raises:
        ConfigError: for a head that the model does not have, or a layer without attention weights.
    """
    layers = layers_of(part)
    if not layers:
        raise ConfigError(f"{type(part).__name__} declares no layers (units), so there is nothing to look at.")
    counts = {name: _heads(part, name) for name in layers}
    if not asked:
        able = [name for name in layers if counts[name]]
        spread = (
            sorted({at * (len(able) - 1) // max(USUAL_LAYERS - 1, 1) for at in range(USUAL_LAYERS)}) if able else []
        )
        return {able[at]: list(range(min(USUAL_HEADS, counts[able[at]]))) for at in spread}
    found: dict[str, list[int]] = {}
    for one in asked:
        layer, _, head = one.partition(".")
        if not layer.isdigit() or not (head.isdigit() or head == "*"):
            raise ConfigError(f"--heads: expected L.H, the numbers of a layer and of a head of it, found {one!r}.")
        if int(layer) >= len(layers):
            raise ConfigError(f"--heads: {one}: the model's layers are 0 to {len(layers) - 1}.")
        name = layers[int(layer)]
        if not counts[name]:
            raise ConfigError(f"--heads: {one}: {why_without(part.get_submodule(name))}.")
        if head != "*" and int(head) >= counts[name]:
            raise ConfigError(f"--heads: {one}: the heads of layer {layer} are 0 to {counts[name] - 1}.")
        some = found.setdefault(name, [])
        some += [number for number in (range(counts[name]) if head == "*" else [int(head)]) if number not in some]
    return found


def _heads(part: nn.Module, name: str) -> int:
    """Query heads of a layer's attention; 0 without."""
    module = kernel_of(part.get_submodule(name))
    return int(getattr(module, "heads", 0)) if module is not None else 0


def _shows(part: nn.Module, name: str) -> bool:
    return _heads(part, name) > 0


@contextmanager
def _watched(part: nn.Module, heads: Mapping[str, Sequence[int]]) -> Iterator[Watch]:
    watch = Watch(part, heads)
    try:
        yield watch
    finally:
        watch.close()


def _read(job: Job, model: Model, ids: Sequence[int]) -> Tensor:
    """The model's last hidden states, `[1, tokens, dim]`."""
    inputs = torch.tensor([ids], device=job.device)
    job.step.batch = Batch(inputs, torch.full_like(inputs, MASKED))
    try:
        hidden: Tensor = model(inputs)
    finally:
        job.step.end()
    return hidden


def _lens(
    job: Job, part: nn.Module, watch: Watch, hidden: Tensor, ids: Sequence[int], tokenizer: Tokenizer
) -> Lens | str:
    """The lens, or why there is none."""
    if (given := job.hooks.gives("head")) != "token_logits":
        return f"The head gives {given!r}, and not token logits."
    states, behind = list(watch.states.values()), list(watch.behind)
    watch.close()
    finished = [_through(behind, one) for one in states]
    if not torch.allclose(finished[-1], hidden, rtol=1e-4, atol=1e-5):
        return f"{type(part).__name__} does something else than its modules between the last layer and the head."
    task, following = hookspecs.task(job), torch.tensor(ids[1:])
    tops, probabilities, ranks = [], [], []
    for one in finished:
        logits = logits_of(task, part, one, len(ids))
        best = logits.log_softmax(-1).max(-1)
        tops.append(best.indices)
        probabilities.append(best.values.exp())
        own = logits[:-1].gather(1, following[:, None])
        ranks.append((logits[:-1] > own).sum(1) + 1)
    texts = [[_text(tokenizer, token) for token in row.tolist()] for row in tops]
    return Lens(torch.stack(tops), torch.stack(probabilities), torch.stack(ranks), texts)


def _through(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def _text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token alone; empty for a part of a character, or a token that the tokenizer does not have."""
    if token >= tokenizer.vocabulary:
        return ""
    return next(text for text, _ in texts_of(tokenizer, [token]))

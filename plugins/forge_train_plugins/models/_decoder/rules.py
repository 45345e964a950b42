"""Rules that relate the values of `[decoder]`, and values that are derived from others. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import TYPE_CHECKING

from forge_train import Problem

if TYPE_CHECKING:
    from forge_train.config import Config as RunConfig

    from ..decoder import Decoder, Rope

_BANDS = ("factor", "original_sequence", "low", "high")
BELONGS = {
    "none": (),
    "linear": ("factor",),
    "llama3": _BANDS,
    "yarn": (*_BANDS, "temperature", "truncate"),
    "dynamic": ("factor", "original_sequence"),
    "longrope": ("original_sequence", "temperature", "short", "long"),
}
"""Scaling → the keys of `[decoder.rope]` it reads, in addition to `theta`."""


def kv_heads(config: Decoder.Config) -> int:
    return config.kv_heads or config.heads


def head_dim(config: Decoder.Config) -> int:
    return config.head_dim or config.dim // config.heads


def hidden(config: Decoder.Config) -> int:
    """Width of a gated feed-forward block with as many weights as an ungated one of 4 dim (arXiv:2002.05202, §3)."""
    return config.hidden or -(-8 * config.dim // (3 * 64)) * 64


def rotated_features(config: Decoder.Config) -> int:
    """The rotated features of each head, rounded as in transformers."""
    return int(head_dim(config) * config.rope.fraction)


def windows(config: Decoder.Config) -> tuple[int, ...]:
    """Return the number of positions that queries of each layer see; 0 means all."""
    return tuple(config.window if on else 0 for on in _repeated(config.window_layers, config.layers))


def rotated(config: Decoder.Config) -> tuple[bool, ...]:
    """Return, for each layer, True if it has positions."""
    return _repeated(config.rope.layers, config.layers)


def _repeated(pattern: tuple[bool, ...], layers: int) -> tuple[bool, ...]:
    return tuple(islice(cycle(pattern or (True,)), layers))


def high(rope: Rope) -> float:
    return rope.high or (4.0 if rope.scaling == "llama3" else 32.0)


def check(config: Decoder.Config, run: RunConfig) -> Iterator[Problem]:
    """Problems that involve several values."""
    sequence, learned = run.train.sequence, config.positions == "learned"
    if not config.head_dim and config.dim % config.heads:
        yield Problem("decoder.heads", f"{config.heads} does not divide decoder.dim ({config.dim}); set head_dim.")
    elif learned:
        if config.rope != type(config.rope)():
            yield Problem("decoder.rope", "has no effect with decoder.positions = 'learned'; remove it.")
    elif head_dim(config) % 2:
        yield Problem("decoder.head_dim", f"rotary positions need an even number, found {head_dim(config)}.")
    elif (features := rotated_features(config)) % 2 or not features:
        yield Problem(
            "decoder.rope.fraction", f"must rotate an even number of features, found {features} of {head_dim(config)}."
        )
    if (sections := config.rope.sections) and (len(sections), sum(sections)) != (3, rotated_features(config) // 2):
        yield Problem(
            "decoder.rope.sections",
            f"expected three numbers whose sum is the {rotated_features(config) // 2} rotated pairs of a head's "
            f"features, found {list(sections)}.",
        )
    if config.heads % kv_heads(config):
        yield Problem("decoder.kv_heads", f"{config.kv_heads} does not divide decoder.heads ({config.heads}).")
    if sequence > config.max_sequence:
        yield Problem("train.sequence", f"{sequence} tokens exceed decoder.max_sequence ({config.max_sequence}).")
    if config.placeholders and config.tied:
        yield Problem("decoder.placeholders", "the head has no such rows, so that decoder.tied must be false.")
    if config.unit_offset and config.norm != "rms":
        yield Problem("decoder.unit_offset", f"has no effect with decoder.norm = {config.norm!r}.")
    if config.qk_norm_over != "head" and not config.qk_norm:
        yield Problem("decoder.qk_norm_over", "has no effect without decoder.qk_norm.")
    if config.window_layers and not config.window:
        yield Problem("decoder.window_layers", "has no effect without decoder.window.")
    yield from _check_patterns(config)
    yield from _check_rope(config.rope)
    yield from _check_by_length(config, run)


def _check_patterns(config: Decoder.Config) -> Iterator[Problem]:
    for key, pattern in (("window_layers", config.window_layers), ("rope.layers", config.rope.layers)):
        if len(pattern) > config.layers:
            yield Problem(f"decoder.{key}", f"has {len(pattern)} entries for {config.layers} layers.")
        elif pattern and not any(pattern):
            way = "decoder.window = 0" if key == "window_layers" else "another plugin's model"
            yield Problem(f"decoder.{key}", f"selects no layer; use {way} instead.")
    theta = config.rope.window_theta
    if theta and not any(windows(config)):
        yield Problem("decoder.rope.window_theta", "has no effect without decoder.window.")
    elif 0 < theta <= 1:
        yield Problem("decoder.rope.window_theta", f"must be 0, or greater than 1; found {theta}.")


def _check_rope(rope: Rope) -> Iterator[Problem]:
    default = type(rope)()
    for key in dict.fromkeys(key for keys in BELONGS.values() for key in keys):
        if key not in BELONGS[rope.scaling] and getattr(rope, key) != getattr(default, key):
            yield Problem(f"decoder.rope.{key}", f"has no effect with scaling = {rope.scaling!r}; remove it.")
    if "original_sequence" in BELONGS[rope.scaling] and not rope.original_sequence:
        yield Problem("decoder.rope.original_sequence", f"scaling = {rope.scaling!r} needs it.")
    if rope.scaling in ("llama3", "yarn") and rope.low >= high(rope):
        yield Problem("decoder.rope.low", f"must be less than high ({high(rope)}), found {rope.low}.")


def _check_by_length(config: Decoder.Config, run: RunConfig) -> Iterator[Problem]:
    """Problems of scalings that depend on a sequence's length."""
    rope, features = config.rope, rotated_features(config)
    if rope.scaling not in ("dynamic", "longrope"):
        return
    if rope.sections:
        yield Problem("decoder.rope.sections", f"can't be combined with scaling = {rope.scaling!r}.")
    if rope.scaling == "dynamic" and features == 2:
        yield Problem("decoder.rope.scaling", "'dynamic' needs more than two rotated features.")
    for key in ("short", "long") if rope.scaling == "longrope" else ():
        found = getattr(rope, key)
        if len(found) != features // 2:
            yield Problem(f"decoder.rope.{key}", f"expected {features // 2} factors, found {len(found)}.")
        elif min(found) <= 0:
            yield Problem(f"decoder.rope.{key}", f"factors must be greater than 0, found {min(found)}.")
    if config.prefix:
        yield Problem(
            "decoder.prefix", f"can't be used with decoder.rope.scaling = {rope.scaling!r}: texts are read again."
        )
    parallel = getattr(run, "parallel", None)
    if parallel is not None and parallel.cp > 1 and run.train.sequence > rope.original_sequence:
        yield Problem(
            "parallel.cp",
            f"decoder.rope.scaling = {rope.scaling!r} depends on the length of each sequence, but a rank would have "
            f"only a slice of it; set parallel.cp = 1, or train.sequence to at most decoder.rope.original_sequence "
            f"({rope.original_sequence}).",
        )

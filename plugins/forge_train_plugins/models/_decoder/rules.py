"""Rules between the values of `[decoder]`, and the values that follow from others. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge_train import Problem

if TYPE_CHECKING:
    from ..decoder import Decoder, Rope

_BANDS = ("factor", "original_sequence", "low", "high")
BELONGS = {
    "none": (),
    "linear": ("factor",),
    "llama3": _BANDS,
    "yarn": (*_BANDS, "temperature", "truncate"),
}
"""Scaling → the keys of `[decoder.rope]` it reads, beside `theta`."""


def kv_heads(config: Decoder.Config) -> int:
    return config.kv_heads or config.heads


def head_dim(config: Decoder.Config) -> int:
    return config.head_dim or config.dim // config.heads


def hidden(config: Decoder.Config) -> int:
    """Width of a gated feed-forward block with as many weights as an ungated one of 4 dim (arXiv:2002.05202, §3)."""
    return config.hidden or -(-8 * config.dim // (3 * 64)) * 64


def high(rope: Rope) -> float:
    return rope.high or (4.0 if rope.scaling == "llama3" else 32.0)


def check(config: Decoder.Config, sequence: int) -> Iterator[Problem]:
    """What several values together get wrong; `sequence` is the training run's, in tokens."""
    if not config.head_dim and config.dim % config.heads:
        yield Problem("decoder.heads", f"{config.heads} does not divide decoder.dim ({config.dim}); set head_dim.")
    elif head_dim(config) % 2:
        yield Problem("decoder.head_dim", f"rotary positions need an even number, found {head_dim(config)}.")
    if config.heads % kv_heads(config):
        yield Problem("decoder.kv_heads", f"{config.kv_heads} does not divide decoder.heads ({config.heads}).")
    if sequence > config.max_sequence:
        yield Problem(
            "train.sequence", f"{sequence} tokens are more than decoder.max_sequence ({config.max_sequence})."
        )
    yield from _check_rope(config.rope)


def _check_rope(rope: Rope) -> Iterator[Problem]:
    default = type(rope)()
    for key in BELONGS["yarn"]:
        if key not in BELONGS[rope.scaling] and getattr(rope, key) != getattr(default, key):
            yield Problem(f"decoder.rope.{key}", f"has no effect with scaling = {rope.scaling!r}; remove it.")
    if rope.scaling in ("llama3", "yarn"):
        if not rope.original_sequence:
            yield Problem("decoder.rope.original_sequence", f"scaling = {rope.scaling!r} needs it.")
        if rope.low >= high(rope):
            yield Problem("decoder.rope.low", f"must be less than high ({high(rope)}), found {rope.low}.")

"""Rotary scalings that depend on the sequence's length, between a `config.json` and `[decoder.rope]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .reader import Reader

if TYPE_CHECKING:
    from ...decoder import Decoder, Rope


def read(kind: str, given: Reader, config: Reader, original: int) -> dict[str, Any]:
    """The options of a scaling.

    Args:
        kind: `dynamic` or `longrope`.
        given: the table that describes the scaling.
        config: the whole file.
        original: length of the original context if the file does not give one; `max_position_embeddings` by default.
    """
    from forge_train_kit.model.rope_by_length import long_attention_factor

    length = config.integer("max_position_embeddings")
    if kind == "dynamic":  # ignores the original length in the table
        return {"factor": given.number("factor"), "original_sequence": length}
    given.skip("original_max_position_embeddings")
    original = config.integer(
        "original_max_position_embeddings",
        original or given.table.get("original_max_position_embeddings", length),
    )
    if original < 1:
        config.refuse("original_max_position_embeddings", "expected a number greater than 0")
    factor, temperature = given.number("factor", 0.0), given.number("attention_factor", 0.0)
    if not temperature and factor:
        temperature = long_attention_factor(factor, original)
    factors = {name: given.numbers(f"{name}_factor") for name in ("short", "long")}
    return {"original_sequence": original, "temperature": temperature, **factors}


def max_sequence(decoder: Mapping[str, Any]) -> int:
    """`max_sequence` for a section that was read; with a dynamic base, `factor` times the length in the file."""
    rope, length = decoder["rope"], decoder["max_sequence"]
    return int(length * rope["factor"]) if rope.get("scaling") == "dynamic" else length


def write(rope: Rope) -> dict[str, Any]:
    """The table that describes a scaling."""
    if rope.scaling == "dynamic":
        return {"rope_type": "dynamic", "factor": rope.factor}
    table: dict[str, Any] = {"rope_type": "longrope", "short_factor": [*rope.short], "long_factor": [*rope.long]}
    table["original_max_position_embeddings"] = rope.original_sequence
    return table | ({"attention_factor": rope.temperature} if rope.temperature else {})


def outer(config: Decoder.Config) -> dict[str, Any]:
    """The keys outside the table."""
    rope = config.rope
    if rope.scaling == "dynamic":
        return {"max_position_embeddings": rope.original_sequence}
    return {"original_max_position_embeddings": rope.original_sequence} if rope.scaling == "longrope" else {}

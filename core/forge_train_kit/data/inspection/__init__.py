"""Results of `forge data inspect`: a summary, document lengths, samples of tokens, and duplicates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from forge_train import ConfigError

from ..documents import Int64
from .material import KEY, Asked, DamagedError, Material, open_material
from .minhash import Duplicates, duplicates
from .samples import Sample, ShownItem, Token, samples

__all__ = ["Asked", "DamagedError", "Findings", "Lengths", "Sample", "ShownItem", "Token", "inspect"]

QUANTILES = (5, 50, 95)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of documents in tokens.

    Args:
        quantiles: per cent → tokens.
        longest: in tokens.
        mean: in tokens.
        bins: smallest and largest length of each bin, and the number of documents in it; a bin ends where the next
            power of two begins.
    """

    quantiles: dict[int, int]
    longest: int
    mean: float
    bins: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, lengths: Int64) -> Lengths:
        """Of at least one document, `[documents]`."""
        power = np.frexp(lengths)[1] - 1  # exact for integers below 2^53
        counts = np.bincount(power)
        first = int(power.min())
        bins = ((2**at, 2 ** (at + 1) - 1, int(counts[at])) for at in range(first, len(counts)))
        quantiles = np.percentile(lengths, QUANTILES, method="inverted_cdf").astype(int).tolist()
        whole = dict(zip(QUANTILES, quantiles, strict=True))
        return cls(whole, int(lengths.max()), float(lengths.mean()), tuple(bins))


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was found.

    Args:
        kind: `prepared`, `tokens` or `source`.
        facts: what there is to say, by name.
        documents: how many.
        tokens: how many.
        learned: how many of the tokens are to be learned.
        lengths: of the documents.
        samples: of them.
        duplicates: among them.
    """

    kind: str
    facts: dict[str, Any]
    documents: int
    tokens: int
    learned: int
    lengths: Lengths
    samples: list[Sample]
    duplicates: Duplicates

    def table(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def inspect(asked: Asked, *, count: int = 3, told: Callable[[str], None] = lambda text: None) -> Findings:
    """Look at data.

    Args:
        asked: what to look at.
        count: of samples.
        told: is given a line about how far it is.

    Raises:
        ConfigError: it can't be read, holds nothing, or an option does not fit it.
        DamagedError: shards are not what was written.
    """
    material = open_material(asked, told)
    documents = material.documents
    if not documents.count:
        raise ConfigError(f"{KEY}: {asked.sources[0]} holds no documents.")
    told(f"looking for duplicates among {documents.count:,} documents")
    return Findings(
        material.kind,
        material.facts,
        documents.count,
        documents.tokens,
        _learned(material),
        Lengths.of(documents.lengths()),
        samples(documents, material.tokenizer, count, records=material.records),
        duplicates(documents, words=material.words),
    )


def _learned(material: Material) -> int:
    shards = material.documents.shards
    return sum(len(one.tokens) if one.trained is None else int(np.count_nonzero(one.trained)) for one in shards)

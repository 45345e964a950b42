"""Divides experts among text and modalities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from forge_train import ConfigError
from forge_train.base.errors import nearest
from forge_train.base.format import format_list
from forge_train_kit.model import Kinds


@dataclass(frozen=True)
class Groups:
    """Experts and positions by kind: 0 is text, k the k-th modality."""

    of_experts: tuple[int, ...]
    kinds: Kinds

    def of_tokens(self, x: Tensor, piece: tuple[int, int]) -> Tensor:
        found: Tensor = self.kinds(x, piece)
        return found


def group_of_experts(experts: int, names: Sequence[str], asked: Mapping[str, int]) -> tuple[int, ...]:
    """The kind of each expert. Those of a kind are spread evenly over the numbers, so that every rank of expert
    parallelism has its share of each.

    Args:
        experts: how many there are.
        names: of the modalities.
        asked: modality → number of its experts; empty for equally many.

    Raises:
        ConfigError: for numbers that do not fit.
    """
    for name in asked:
        if name not in names:
            known = f" The modalities are {', '.join(names)}." if names else " No plugin gives a modality."
            raise ConfigError(f"moma.experts: there is no modality {name!r}.{nearest(name, names)}{known}")
    if asked:
        missing = [name for name in names if name not in asked]
        if missing:
            raise ConfigError(f"moma.experts: {missing[0]!r} is missing; say how many experts each modality has.")
        counts = [experts - sum(asked.values()), *(asked[name] for name in names)]
    else:
        kinds = len(names) + 1
        if experts % kinds:
            raise ConfigError(
                f"moma.experts: {experts} experts (moe.experts) can't be divided evenly among text and "
                f"{format_list(names)}; say how many each modality has."
            )
        counts = [experts // kinds] * kinds
    if min(counts) < 1:
        raise ConfigError(
            f"moma.experts: of {experts} experts (moe.experts), text would have {counts[0]} and the modalities "
            f"{', '.join(map(str, counts[1:]))}; each needs one or more."
        )
    places = [((at + 0.5) / count, kind) for kind, count in enumerate(counts) for at in range(count)]
    return tuple(kind for _, kind in sorted(places))

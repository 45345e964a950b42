"""Trials of modalities: the encoder's features of an item depend on nothing beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge_train.compose.initialise import materialise
from forge_train_kit.enabled_modalities import enabled_modalities
from forge_train_kit.modalities import encoders_of, extras_of, vectors_of

from ..bench import Bench, Trials, close
from ..conformance import SkippedError, require

BATCHES = 4


def items_are_apart(bench: Bench) -> str:
    """The items of the run's first batches, encoded together and each alone."""
    tried, known = dict[str, int](), enabled_modalities(bench.job)
    for batch in bench.batches(BATCHES):
        given = bench.answer("modalities")
        if any(hasattr(modality, "keywords") for modality in given):
            raise SkippedError("the class of the model encodes its items itself")
        for modality in (known[one.name] for one in given):
            values, grids, _ = (batch.extras.get(one) for one in extras_of(modality.name))
            if values is not None and grids is not None and bool(grids.any()):
                with torch.device("meta"):
                    encoder = encoders_of(known, bench.layer.dim)[modality.name]
                count = _apart(modality, encoder, bench.layer.dim, values, grids)
                tried[modality.name] = tried.get(modality.name, 0) + count
    if not tried:
        raise SkippedError("the data of this check has no item; enable a plugin that reads some, and name its files")
    return ", ".join(f"{count} of {name}" for name, count in tried.items())


def _apart(modality: Any, encoder: Any, width: int, values: Tensor, grids: Tensor) -> int:
    materialise(encoder, torch.device("cpu"), seed=0)
    encoder.eval()
    with torch.no_grad():
        together, counts = encoder(values, grids), vectors_of(encoder, grids)
        require(
            together.shape[::2] == (len(values), width), f"gives {list(together.shape)}, expected [batch, vectors, dim]"
        )
        require(bool(torch.isfinite(together).all()), "gives values that are not finite")
        nothing = encoder(torch.zeros_like(values[:, :1]), torch.zeros_like(grids[:, :1]))
        require(bool(torch.isfinite(nothing).all()), "gives values that are not finite for rows without items")
        tried = 0
        for row, (own, sizes) in enumerate(zip(values, grids.tolist(), strict=True)):
            patch = vector = 0
            for size, count in zip(sizes, counts[row].tolist(), strict=True):
                if not any(size):
                    continue
                patches = size[0] * size[1] * size[2]
                grid = (size[0], size[1], size[2])
                expected = modality.positions(grid)
                require(
                    count == expected, f"gives {count} vectors for a grid of {size}, and positions() says {expected}"
                )
                sides = modality.spread(grid) if hasattr(modality, "spread") else None
                require(
                    sides is None or sides[0] * sides[1] * sides[2] == count,
                    f"gives {count} vectors for a grid of {size}, and spread() says {sides}",
                )
                alone = encoder(own[None, patch : patch + patches], torch.tensor([[size]]))[0, :count]
                close(together[row, vector : vector + count], alone, "an item beside others, and alone", 1e-5)
                patch, vector, tried = patch + patches, vector + count, tried + 1
            spoilt = own.clone()
            spoilt[patch:] = 1
            found = encoder(spoilt[None], grids[row : row + 1])[0, :vector]
            close(found, together[row, :vector], "a row with other padding", 1e-5)
    return tried


TRIALS: Trials = {"modalities": [("keeps items apart", items_are_apart)]}

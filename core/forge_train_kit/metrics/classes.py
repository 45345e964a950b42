"""Classification metrics. Labels equal to `MASKED` are ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from forge_train.contract.batch import MASKED
from forge_train.contract.events import Metric


class Accuracy(Metric):
    """Share of labels that are among the likeliest classes.

    Args:
        top: number of likeliest classes that count.
    """

    def __init__(self, top: int = 1) -> None:
        super().__init__(sums=2)
        self._top = top

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """`scores [..., classes]`, `labels [...]`."""
        if scores.shape[:-1] != labels.shape:
            raise ValueError(
                f"scores {list(scores.shape)} need labels of their shape without classes, found {list(labels.shape)}"
            )
        counted = labels != MASKED
        if self._top == 1:
            right = (scores.argmax(-1) == labels) & counted
        else:
            right = (scores.detach().topk(self._top, dim=-1).indices == labels.unsqueeze(-1)).any(-1) & counted
        self.sums[0].add_(right.sum())
        self.sums[1].add_(counted.sum())

    def value(self, sums: Tensor, maxima: Tensor) -> float:
        return float(sums[0] / sums[1])


class ConfusionMatrix(Metric):
    """Confusion matrix: accuracy, and precision, recall and F1 averaged over the classes that occur among labels or
    predictions. A class that is never predicted has precision 0, one that never occurs recall 0.

    Args:
        classes: number of classes.
        cells: whether to also log every nonzero cell, as `label.predicted`.
    """

    def __init__(self, classes: int, *, cells: bool = False) -> None:
        super().__init__(sums=classes * classes)
        self._classes, self._cells = classes, cells

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        """Class ids of one shape."""
        counted = labels != MASKED
        place = torch.where(counted, labels * self._classes + predicted, 0).reshape(-1).long()
        self.sums.index_add_(0, place, counted.reshape(-1).double())

    def value(self, sums: Tensor, maxima: Tensor) -> Mapping[str, float]:
        matrix = sums.view(self._classes, self._classes)
        right, labels, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
        there = (labels + predicted) > 0
        means = {
            "precision": right / predicted.clamp(min=1),
            "recall": right / labels.clamp(min=1),
            "f1": 2 * right / (labels + predicted).clamp(min=1),
        }
        found = {"accuracy": float(right.sum() / matrix.sum())}
        found |= {name: float(each[there].mean()) for name, each in means.items()}
        if self._cells:
            found |= {f"{row}.{column}": float(matrix[row, column]) for row, column in matrix.nonzero().tolist()}
        return found


class AUROC(Metric):
    """The area under the receiver operating characteristic: how often a positive scores higher than a negative.

    Scores are counted in bins, and a pair in one bin counts as a tie (½): the error is at most half the share of such
    pairs among all pairs of a positive and a negative, about 1 / (2 · bins) for scores that are spread evenly. NaN
    where a score is, or where there are only positives or only negatives.

    Args:
        bins: equal ones, between 0 and 1.
    """

    def __init__(self, bins: int = 4096) -> None:
        super().__init__(sums=2 * bins + 1)  # the last counts NaNs
        self._bins = bins

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """`scores` in [0, 1] and `labels` 0 or 1, of one shape."""
        counted = labels != MASKED
        bin_ = (scores.detach().double() * self._bins).long().clamp(0, self._bins - 1)
        place = torch.where(scores.isnan(), 2 * self._bins, bin_ + self._bins * labels)
        place = torch.where(counted, place, 0).reshape(-1)
        self.sums.index_add_(0, place, counted.reshape(-1).double())

    def value(self, sums: Tensor, maxima: Tensor) -> float:
        if sums[-1]:
            return math.nan
        negatives, positives = sums[:-1].view(2, self._bins)
        above = positives.sum() - positives.cumsum(0)
        return float((negatives * (above + positives / 2)).sum() / (negatives.sum() * positives.sum()))

"""Metrics that accumulate on the device: what a plugin's `metrics` hook and an `Evaluator` give.

Each has an `update` of its own, which takes plain tensors on any device, reads none of them, and keeps no graph. The
kernel adds the states of all ranks up when they are logged; see `forge_train.Metric`. Importing this imports torch.
"""

from __future__ import annotations

from .basic import Max, Mean, Min, Perplexity, Ratio, Sum
from .classes import AUROC, Accuracy, ConfusionMatrix
from .norm import Norm
from .spread import Histogram, Quantile

__all__ = [
    "AUROC",
    "Accuracy",
    "ConfusionMatrix",
    "Histogram",
    "Max",
    "Mean",
    "Min",
    "Norm",
    "Perplexity",
    "Quantile",
    "Ratio",
    "Sum",
]

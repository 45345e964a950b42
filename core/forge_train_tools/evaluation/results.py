"""Results of tasks: metrics with their standard errors, and the files that keep them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from urllib.parse import quote

from forge_train.base.errors import ConfigError
from forge_train.base.files import write_json
from forge_train.base.strict_json import loads
from forge_train.run.run import is_run

FOLDER = "evaluations"
"""Folder of a run that has a folder for each evaluated checkpoint."""


@dataclass(frozen=True)
class Metric:
    """A number about all records of a task.

    Args:
        value: the number.
        error: its standard error; None if unknown.
        each: what each record contributes, where the number is their mean, or their sum over the sum of `weights`.
        weights: of the records; empty for a mean.
    """

    value: float
    error: float | None = None
    each: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()

    @classmethod
    def mean(cls, each: Sequence[float]) -> Metric:
        """The mean, with its standard error."""
        return cls(fmean(each), standard_error(each), tuple(each))

    @classmethod
    def perplexity(cls, log_likelihoods: Sequence[float], units: Sequence[int]) -> Metric:
        """Perplexity per unit: exp(−Σ log-likelihood / Σ units); its error by linearisation."""
        rate, error = _ratio(log_likelihoods, units)
        try:
            value = math.exp(-rate)
        except OverflowError:
            value = math.inf
        return cls(value, None if error is None else value * error, tuple(log_likelihoods), tuple(map(float, units)))

    @classmethod
    def bits(cls, log_likelihoods: Sequence[float], units: Sequence[int]) -> Metric:
        """Bits per unit: −Σ log-likelihood / (Σ units · ln 2)."""
        rate, error = _ratio(log_likelihoods, units)
        scale = math.log(2)
        found = None if error is None else error / scale
        return cls(-rate / scale, found, tuple(log_likelihoods), tuple(map(float, units)))


def standard_error(each: Sequence[float]) -> float | None:
    """Of a mean; None for fewer than two values."""
    return stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None


def _ratio(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float | None]:
    """Σ values / Σ weights, and its standard error (Cochran, Sampling Techniques, 1977, section 6.3)."""
    rate, mean = sum(values) / sum(weights), fmean(weights)
    return rate, standard_error([(value - rate * weight) / mean for value, weight in zip(values, weights, strict=True)])


@dataclass(frozen=True)
class TaskResult:
    """Results of a task.

    Args:
        name: of the task.
        kind: of the task; `lm-eval` for one of lm-evaluation-harness.
        digest: of the questions: results are compared if it is the same.
        records: number of records.
        shots: number of examples before each prompt.
        cut: number of requests that lost tokens on their left.
        metrics: by name.
    """

    name: str
    kind: str
    digest: str
    records: int
    shots: int
    cut: int
    metrics: Mapping[str, Metric]

    def plain(self, *, whole: bool) -> dict[str, Any]:
        """As JSON.

        Args:
            whole: whether with what each record contributes.
        """
        metrics = {name: _plain(one, whole=whole) for name, one in self.metrics.items()}
        return {**vars(self), "metrics": metrics}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> TaskResult:
        """The opposite of `plain`."""
        metrics = {
            name: Metric(one["value"], one["error"], tuple(one.get("each", ())), tuple(one.get("weights", ())))
            for name, one in plain["metrics"].items()
        }
        return cls(**{**plain, "metrics": metrics})


def _plain(metric: Metric, *, whole: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"value": metric.value, "error": metric.error}
    return found | ({"each": [*metric.each], "weights": [*metric.weights]} if whole else {})


def file_name(task: str, suffix: str) -> str:
    """The file of a task, whose name may have any characters."""
    return f"{quote(task, safe=' ')}.{suffix}"


def write(folder: Path, result: TaskResult) -> None:
    """Write the file of a task; those of other tasks stay.

    Raises:
        OSError: the disk refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / file_name(result.name, "json"), result.plain(whole=True))


def read(path: Path) -> dict[str, TaskResult]:
    """The results in a folder, those of a checkpoint, or those of a run's last evaluated checkpoint, by task.

    Raises:
        ConfigError: there are none, or a file is damaged.
    """
    if not path.exists():
        raise ConfigError(f"{path}: there is no such run, checkpoint or folder of results.")
    folder = path
    if is_run(path):
        folder = max((one for one in (path / FOLDER).glob("step-*") if one.is_dir()), default=path)
    elif is_run(path.parent.parent):
        folder = path.parent.parent / FOLDER / path.name
    found = {}
    for file in sorted(folder.glob("*.json")) if folder != path or not is_run(path) else []:
        try:
            one = TaskResult.of(loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{file}: is no result of `forge eval --task`: {error}") from error
        found[one.name] = one
    if not found:
        raise ConfigError(f"{path} has no results of tasks; `forge eval {path} --task …` makes some.")
    return found

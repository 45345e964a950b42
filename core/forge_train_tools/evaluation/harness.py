"""Tasks of lm-evaluation-harness (Gao et al. 2024, doi:10.5281/zenodo.12608602), opened without a model."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from functools import cache, partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from urllib.parse import urlsplit

from forge_train.base.errors import ConfigError, ForgeError, describe, nearest

from .results import Metric, TaskResult

if TYPE_CHECKING:
    from .asking import Answering
    from .local_tasks import Sample

YAML = (".yaml", ".yml")
_RESAMPLES = 1_000
"""For standard errors that have no formula."""
_WEIGHTED = {"word_perplexity": Metric.perplexity, "byte_perplexity": Metric.perplexity, "bits_per_byte": Metric.bits}
"""Metrics of sums over units, for which the harness gives no standard error."""
_PATIENCE = 5.0
"""Seconds in which the hub must answer."""
_LOCAL = (
    "Fetch it where there is a network (the cache of `datasets` can be copied), or write a YAML file with "
    "`dataset_path: json` and `dataset_kwargs: {data_files: {test: FILE}}`."
)


class Harness:
    """Some tasks, with their data.

    Args:
        loaded: as `TaskManager.load` gives them.
        limit: records of each; 0 takes all.
    """

    def __init__(self, loaded: Mapping[str, Any], limit: int) -> None:
        self._loaded, self._limit = loaded, limit
        self.names: list[str] = [*loaded["tasks"]]
        self.writes = any(one.OUTPUT_TYPE == "generate_until" for one in loaded["tasks"].values())
        """True if a task has the model write."""

    def each(self) -> list[Harness]:
        """Every task by itself."""
        return [
            Harness({"tasks": {name: task}, "groups": {}, "group_map": {}}, self._limit)
            for name, task in self._loaded["tasks"].items()
        ]

    def run(self, asked: Answering, *, bare: bool = False) -> Iterator[tuple[TaskResult, list[Sample]]]:
        """Evaluate a model on them; gives the result and the samples of each, and the result of each group.

        Args:
            asked: the model.
            bare: whether only values are wanted: no samples, no standard error that takes resamples, and no bar of
                progress.
        """
        from lm_eval import evaluate

        from .harness_model import HarnessModel

        model, limit, resamples = HarnessModel(asked), self._limit or None, 0 if bare else _RESAMPLES
        try:
            with (
                _quiet(),
                _compiled_once(),
                _without_bars() if bare else nullcontext(),
                patch.dict(os.environ, {"DISABLE_MULTIPROC": "1"}),  # it would fork, and there are threads
            ):
                found = evaluate(
                    model, dict(self._loaded), limit=limit, bootstrap_iters=resamples, log_samples=not bare
                )
        except Exception as error:  # whatever templates, filters and metrics of a task do
            if asked.failed or isinstance(error, ForgeError):
                raise
            raise ConfigError(f"--task: lm-eval can't evaluate {', '.join(self.names)}: {describe(error)}.") from error
        for name, table in found["results"].items():
            samples = (found.get("samples") or {}).get(name, [])
            metrics = {_title(key): _metric(key, table, samples) for key in table if _is_metric(key, table)}
            if metrics:
                made = (
                    _digest(self._loaded["tasks"].get(name), samples),
                    _records(table, samples),
                    int(found["n-shot"].get(name) or 0),
                )
                yield TaskResult(name, "lm-eval", *made, model.cut[name], metrics), [*map(_plain, samples)]


def open_harness(names: Sequence[str], limit: int) -> Harness:
    """The tasks with some names, with their data.

    Args:
        names: of tasks that are registered, or YAML files.
        limit: see `Harness`.

    Raises:
        ConfigError: lm-eval is not installed, there is no such task, or its data can't be had here.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(f"--task {names[0]} needs lm-eval: pip install 'forge-train[eval]'") from error
    with _quiet(), _offline_if_out_of_reach():
        manager = TaskManager(include_defaults=any(Path(one).suffix not in YAML for one in names))
        loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
        for name in names:
            found = _loaded(manager, name)
            if twice := sorted(loaded["tasks"].keys() & found["tasks"].keys()):
                raise ConfigError(f"--task {name}: there is another task {twice[0]!r}; leave one out.")
            for key, table in found.items():
                loaded[key] |= table
    for name, task in loaded["tasks"].items():
        _check(name, task)
    return Harness(loaded, limit)


def _loaded(manager: Any, name: str) -> Mapping[str, Any]:
    if Path(name).suffix in YAML:
        if not Path(name).is_file():
            raise ConfigError(f"--task: there is no file {name}.")
    elif name not in manager.task_index:
        raise ConfigError(
            f"--task {name}: lm-eval has no such task; files end in .toml, .jsonl or .yaml."
            f"{nearest(name, manager.all_tasks)}"
        )
    try:
        found: Mapping[str, Any] = manager.load([name])
    except Exception as error:  # whatever data sets, templates and functions of a task do
        if isinstance(error, ConnectionError) or type(error).__module__.startswith(("datasets.", "huggingface_hub.")):
            raise ConfigError(f"--task {name}: its data set can't be had here ({describe(error)}). {_LOCAL}") from error
        raise ConfigError(f"--task {name}: can't be opened: {describe(error).rstrip('.')}.") from error
    return found


def _check(name: str, task: Any) -> None:
    """Set what the harness leaves to whoever calls it, and refuse what can't be done."""
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(
            f"--task {name}: runs what the model wrote, which Forge does not do. Export the model, and run lm-eval in "
            "a sandbox."
        )
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(f"--task {name}: needs images or sounds, which models of Forge do not read.")
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=1234)  # that of lm-eval's own command


@contextmanager
def _offline_if_out_of_reach() -> Iterator[None]:
    """Without a network, `datasets` tries for half a minute; then only what it has in its cache is asked for."""
    import datasets.config
    import huggingface_hub.constants

    address = urlsplit(huggingface_hub.constants.ENDPOINT)
    behind = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    with ExitStack() as stack:
        if not (behind or _answers(address.hostname or "", address.port or 443)):
            stack.enter_context(patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True))
            stack.enter_context(patch.object(datasets.config, "HF_HUB_OFFLINE", True))
        yield


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_PATIENCE).close()
    except OSError:
        return False
    return True


@contextmanager
def _compiled_once() -> Iterator[None]:
    """A block in which a template is compiled once, and not for each record."""
    from jinja2 import Environment

    with patch.object(Environment, "from_string", cache(Environment.from_string)):
        yield


@contextmanager
def _without_bars() -> Iterator[None]:
    from tqdm import tqdm

    with patch.object(tqdm, "__init__", partialmethod(tqdm.__init__, disable=True)):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Stdout is for results, and the harness prints and logs how it is doing."""
    from lm_eval import evaluate

    log = logging.getLogger(evaluate.__module__.partition(".")[0])
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        log.setLevel(level)


def _is_metric(key: str, table: Mapping[str, Any]) -> bool:
    name, comma, _ = key.partition(",")
    return bool(comma) and not name.endswith("_stderr") and isinstance(table[key], (int, float))


def _title(key: str) -> str:
    """The name of a metric, with that of the filter if it has one."""
    name, _, chosen = key.partition(",")
    return name if chosen == "none" else f"{name}, {chosen}"


def _metric(key: str, table: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Metric:
    """A number of the harness, its standard error, and what each record has to do with it."""
    name, _, chosen = key.partition(",")
    values = [one[name] for one in samples if one["filter"] == chosen and name in one]
    error = table.get(f"{name}_stderr,{chosen}")
    own = Metric(float(table[key]), float(error) if isinstance(error, (int, float)) else None)
    if values and all(isinstance(one, (int, float)) for one in values):
        return Metric(own.value, own.error, tuple(map(float, values)))
    if name in _WEIGHTED and values:
        made = _WEIGHTED[name](*zip(*values, strict=True))
        return Metric(own.value, made.error, made.each, made.weights)
    return own


def _records(table: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> int:
    return len({one["doc_id"] for one in samples}) or int(table.get("sample_len") or 0)


def _digest(task: Any, samples: Sequence[Mapping[str, Any]]) -> str:
    """Of what was asked and what the answers are measured by; a group has neither a task nor samples."""
    asked = [[one[name] for name in ("arguments", "doc_hash", "target", "filter", "metrics")] for one in samples]
    names = ("doc_to_target", "process_results", "filter_list", "metric_list") if task is not None else ()
    text = json.dumps([asked, [task.get_config(name) for name in names]], ensure_ascii=False, default=_source)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _source(value: Any) -> str:
    """A function as its text, which does not depend on where in memory it is; anything else as text."""
    if not callable(value):
        return str(value)
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        return str(getattr(value, "__qualname__", type(value).__qualname__))


def _plain(sample: Mapping[str, Any]) -> Sample:
    """A sample as JSON, without the harness's hashes."""
    kept = {name: one for name, one in sample.items() if not name.endswith("_hash") and name != "doc_id"}
    found: Sample = json.loads(json.dumps(kept, default=_number))
    return found


def _number(value: Any) -> Any:
    """A number of numpy as Python's; anything else as text."""
    item = getattr(value, "item", None)
    return item() if item is not None else str(value)

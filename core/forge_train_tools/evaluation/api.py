"""The Python API of `forge eval --task`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..messages import shown
from ..process import alone, unchanged
from ..run_folder import RunFolder
from ..sources import as_assignments

if TYPE_CHECKING:
    from .job import EvaluatedTasks, EvaluationOptions


def evaluate(
    path: str | Path | RunFolder,
    tasks: Iterable[str | Path],
    *,
    plugins: Iterable[str] = (),
    set: Mapping[str, Any] | None = None,
    nproc: int = 1,
    **options: Unpack[EvaluationOptions],
) -> EvaluatedTasks:
    """Evaluate a trained model on tasks; its run, if it has one, gets the results.

    Args:
        path: a run, a checkpoint, or a Hugging Face folder.
        tasks: files of tasks or of records, names of tasks of lm-eval, or YAML files for it.
        plugins: plugins to enable too.
        set: values to override, as in `train`.
        nproc: local processes to use, including this one.
        options: `limit`, `batch`, `samples` and `against`, as in `forge eval`.

    Raises:
        ConfigError: for a path, a task or a record that can't be, before anything is computed.
    """
    with alone(), shown(progress=False), unchanged():
        from .job import Evaluation, evaluate_tasks

        asked = Evaluation(
            path=path.path if isinstance(path, RunFolder) else Path(path),
            tasks=tuple(map(str, [tasks] if isinstance(tasks, (str, Path)) else tasks)),
            plugins=tuple(plugins),
            set=tuple(as_assignments(set or {})),
            **options,
        )
        return evaluate_tasks(asked, nproc=nproc)

"""Tools that look at runs from outside, and the Python API: `from forge_train_tools import train`.

Nothing here is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import open_model as open_model
    from .api import plan as plan
    from .api import train as train
    from .api import verify as verify
    from .offline.trained_model import TrainedModel as TrainedModel
    from .planning import Plan as Plan
    from .run_folder import RunFolder as RunFolder
    from .run_folder import open_run as open_run
    from .verification import Verdict as Verdict

_HOME = {
    "api": "open_model plan train verify",
    "offline.trained_model": "TrainedModel",
    "planning": "Plan",
    "run_folder": "RunFolder open_run",
    "verification": "Verdict",
}
_WHERE = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = [*sorted(_WHERE)]  # noqa: PLE0604  # built from the table above, as in forge_train itself


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})

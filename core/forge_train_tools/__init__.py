"""Tools that look at runs from outside, and the Python API: `from forge_train_tools import train`.

Nothing here is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train.base.names import lazy_names

if TYPE_CHECKING:
    from .api import infer as infer
    from .api import open_model as open_model
    from .api import plan as plan
    from .api import train as train
    from .api import verify as verify
    from .evaluation.api import evaluate as evaluate
    from .generating import generate as generate
    from .offline.trained_model import TrainedModel as TrainedModel
    from .planning import Plan as Plan
    from .run_folder import RunFolder as RunFolder
    from .run_folder import open_run as open_run
    from .verification import Verdict as Verdict

_WHERE, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "api": "infer open_model plan train verify",
        "generating": "generate",
        "evaluation.api": "evaluate",
        "offline.trained_model": "TrainedModel",
        "planning": "Plan",
        "run_folder": "RunFolder open_run",
        "verification": "Verdict",
    },
)

__all__ = [*sorted(_WHERE)]  # noqa: PLE0604  # built from the table above, as in forge_train itself

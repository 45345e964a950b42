"""The test kit: try a plugin without packaging it, train something tiny, check a plugin against the contract.

It is also a pytest plugin, found by every pytest in an environment with forge: fixtures `forge_plugins`,
`run_forge` and `ranks`. Nothing here is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conformance import Check as Check
    from .conformance import Report as Report
    from .conformance import assert_conforms as assert_conforms
    from .conformance import check as check
    from .environment import Installed as Installed
    from .environment import installed as installed
    from .metrics import check_metric as check_metric
    from .pool import Pool as Pool
    from .pool import PoolError as PoolError
    from .runs import RunForge as RunForge
    from .runs import TinyRun as TinyRun
    from .runs import run_forge as run_forge
    from .verifying import Verifier as Verifier

_HOME = {
    "conformance": "Check Report assert_conforms check",
    "environment": "Installed installed",
    "metrics": "check_metric",
    "pool": "Pool PoolError",
    "runs": "RunForge TinyRun run_forge",
    "verifying": "Verifier",
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

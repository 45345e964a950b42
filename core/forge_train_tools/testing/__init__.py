"""The test kit: try a plugin without packaging it, train something tiny, check a plugin against the contract.

It is also a pytest plugin, found by every pytest in an environment with forge: fixtures `forge_plugins`,
`run_forge` and `ranks`. Nothing here is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train.base.names import lazy_names

if TYPE_CHECKING:
    from .bench import Bench as Bench
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

_WHERE, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "bench": "Bench",
        "conformance": "Check Report assert_conforms check",
        "environment": "Installed installed",
        "metrics": "check_metric",
        "pool": "Pool PoolError",
        "runs": "RunForge TinyRun run_forge",
        "verifying": "Verifier",
    },
)

__all__ = [*sorted(_WHERE)]  # noqa: PLE0604  # built from the table above, as in forge_train itself

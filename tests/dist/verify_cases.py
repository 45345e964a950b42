"""What the tests of `forge verify` have their ranks do."""

from __future__ import annotations

from typing import Any

from forge_train.verification.record import worker


def take(**arguments: Any) -> str:
    """Record a layout; the error of a composition that can't be."""
    from forge_train import ForgeError

    try:
        worker(**arguments)
    except ForgeError as error:
        return f"{error.code}: {error}"
    return ""

"""Calls to a file system that fsspec knows by its address, over connections that break."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from forge_train.base.errors import ConfigError, describe

_TRIES = 6
"""Failures in a row, without a byte in between, after which it is given up."""
_PAUSE = 0.2
"""Seconds before the second try; each further pause is twice as long."""
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, ValueError, TypeError)
"""Errors that another try does not mend."""

T = TypeVar("T")


def filesystem(address: str, label: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it.

    Args:
        label: the address as errors give it.

    Raises:
        ConfigError: fsspec does not know the scheme, or its package is not installed.
    """
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{label} can't be read: {error}") from error
    return system, path


def patiently(label: str, action: Callable[[], T], what: str = "can't be read") -> T:
    """Return the result of `action`, retrying after connection errors.

    Args:
        label: the address, as shown in errors.
        action: called again after each failure, with growing pauses.
        what: the failure in words, for errors.

    Raises:
        ConfigError: if there is no such file, or it failed too often.
    """
    for failures in range(1, _TRIES + 1):
        try:
            return action()
        except ConfigError:
            raise
        except Exception as error:  # every file system has exceptions of its own
            cause = error.__cause__
            if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and _of_connection(cause):
                error = cause  # fsspec's http says that there is no file whenever it can't connect
            status = getattr(error, "status", 0)
            if isinstance(error, FileNotFoundError) or status == 404:
                raise ConfigError(f"{label}: no such file or folder") from error
            final = isinstance(error, _FINAL) or (400 <= status < 500 and status != 429)
            if final or failures == _TRIES:
                times = "" if final else f" ({failures} tries)"
                raise ConfigError(f"{label} {what}: {describe(error)}{times}") from error
        time.sleep(_PAUSE * 2 ** (failures - 1))
    raise AssertionError


def _of_connection(error: Exception) -> bool:
    return type(error).__module__.startswith("aiohttp.") or isinstance(error, TimeoutError)

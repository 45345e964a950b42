"""Installed versions of flash-attn, found without importing any of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

MODULES = {"2": "flash_attn", "3": "flash_attn_interface", "4": "flash_attn.cute"}
"""The module in which each version has its `flash_attn_varlen_func`."""
RUNS_ON = {"2": range(8, 99), "3": range(9, 10), "4": range(9, 12)}
"""Major compute capabilities: from Ampere on, Hopper, Hopper and Blackwell."""
PACKAGES = {"2": "flash-attn", "3": "flash_attn_3", "4": "flash-attn-4"}


def installed() -> tuple[str, ...]:
    """The installed versions, newest first.

    `flash_attn` alone does not tell: version 4 is in a folder of that name, too.
    """
    found = []
    package = importlib.util.find_spec("flash_attn")
    if package and any(Path(folder, "cute").is_dir() for folder in package.submodule_search_locations or ()):
        found.append("4")
    if importlib.util.find_spec("flash_attn_interface"):
        found.append("3")
    if package and importlib.util.find_spec("flash_attn_2_cuda"):
        found.append("2")
    return tuple(found)


def missing(wanted: str) -> str:
    """A sentence that says what is missing and how to install it; empty if it is installed."""
    here = installed()
    if wanted == "auto":
        return "" if here else "flash-attn is not installed. Install it: pip install flash-attn --no-build-isolation"
    if wanted in here:
        return ""
    return f"flash-attn {wanted} is not installed (package {PACKAGES[wanted]}); installed: {', '.join(here) or 'none'}."


def choose(wanted: str, here: tuple[str, ...], major: int) -> str:
    """The version to take, or an empty string if none runs.

    Args:
        wanted: a version, or `auto`.
        here: the installed versions, newest first.
        major: the device's major compute capability.
    """
    return next((one for one in here if wanted in ("auto", one) and major in RUNS_ON[one]), "")

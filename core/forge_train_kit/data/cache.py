"""Cache folders for data that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(cache: str, name: str) -> Path:
    """A plugin's cache: the folder that was chosen, or the user's."""
    home = os.environ.get("XDG_CACHE_HOME")
    user = Path(home) if home else Path.home() / ".cache"
    return Path(cache).expanduser() if cache else user / "forge-train" / name

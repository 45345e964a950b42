"""Blame for an error that came out of what a plugin's hook gave, long after the hook was called."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from forge_train.base.errors import Where, locate
from forge_train.base.names import HookOrigin
from forge_train.plugin.calls import EnabledPlugin, at_home, implemented
from forge_train.plugin.specs import HookSpec

GIVING = ("slot", "chain", "phases", "steps", "spans")
"""Kinds of hooks that give what is called later."""


def note_plugin(
    error: BaseException, enabled: Iterable[EnabledPlugin], specs: Mapping[str, HookSpec[..., Any]]
) -> None:
    """Name the plugin whose code an error comes from, the hook that gave it and what was called, unless the call of a
    hook has named it: what hooks give (an executor, a span, a function for batches) is called without asking the hook
    again."""
    if getattr(error, "where", Where()).plugin or any(
        note.startswith("in plugin ") for note in getattr(error, "__notes__", ())
    ):
        return
    enabled = list(enabled)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    homes = [at_home(str(frame.f_globals.get("__name__", "")), enabled) for frame in frames]
    inner = next((at for at in reversed(range(len(frames))) if homes[at]), None)
    if inner is None:
        return
    here = homes[inner]
    method = [one for one in here if frames[inner].f_code.co_qualname.startswith(f"{one.cls.__qualname__}.")]
    owners = method or here
    labels = dict.fromkeys(one.ref.label for one in owners)
    outer = next(at for at in range(inner, -1, -1) if at == 0 or homes[at - 1] != here)
    hook = _gave(error, owners[0], specs) if len(labels) == 1 else ""
    locate(error, plugin=owners[0].name, hook=hook)
    by = f", hook {hook}" if hook else ""
    error.add_note(f"in plugin {' or '.join(labels)}{by} ({frames[outer].f_code.co_qualname})")


def _gave(error: BaseException, owner: EnabledPlugin, specs: Mapping[str, HookSpec[..., Any]]) -> str:
    """The hook that gave the function of a plugin from which an error came; empty if several may have."""
    passed: Iterable[HookOrigin] = getattr(error, "passed", ())
    if hook := next((one.hook for one in passed if one.plugin == owner.name), ""):
        return hook
    known = [specs[hook] for hook in implemented(owner.cls) if hook in specs]
    giving = [one.name for one in known if one.kind in GIVING or one.used_later]
    return giving[0] if len(giving) == 1 else ""

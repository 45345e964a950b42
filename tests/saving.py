"""What the tests of saving share: a disk that waits, states that are overwritten, checkpoints compared."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from forge_train import Plugin, hookimpl
from forge_train.base.files import remove_remains
from forge_train.checkpoint import writing
from forge_train.checkpoint.found import Saved
from forge_train.mesh.distributed import DistributedContext
from forge_train.store.tree import split
from forge_train_kit.full_tensors import files_of
from forge_train_tools.saver import Saver

ASYNC = {"checkpoint.asynchronous": True}


def save_step(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    dist: DistributedContext,
    *,
    beside: list[Path],
    form: str = "sharded",
) -> Saved:
    """Write `folder/step-…` as a run does, and have `folder/latest` name it."""
    remove_remains(folder)
    staged = writing.stage(folder / f"step-{step:08d}", step, state, dist, files=files_of(form))
    return writing.commit(staged, dist, beside=beside, latest=folder / "latest")


def stepping(at: Callable[[int], object]) -> type[Plugin]:
    """A plugin that calls a function with the number of every step that is done."""

    class Stepping(Plugin):
        @hookimpl
        def on_step(self, step: Any) -> None:
            at(step.step)

    return Stepping


def filling(monkeypatch: pytest.MonkeyPatch, step: int, owner: object, name: str) -> type[Plugin]:
    """A plugin with which the disk is full in this function once a step is to be saved."""

    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Fills(Plugin):
        @hookimpl
        def on_checkpoint(self, event: Any) -> None:
            if (event.kind, event.step) == ("saving", step):
                monkeypatch.setattr(owner, name, refuse)

    return Fills


@contextmanager
def slow_disk(until: threading.Event) -> Iterator[list[int]]:
    """Have nothing written in the background before an event. The steps of checkpoints that were begun."""
    begun: list[int] = []
    real = writing.commit

    def commit(staged: Any, *arguments: Any, **more: Any) -> Any:
        begun.append(staged.step)
        if threading.current_thread() is not threading.main_thread():
            assert until.wait(60)
        return real(staged, *arguments, **more)

    with patch("forge_train.loop.saver.commit", commit):
        yield begun


class Lingering:
    """Keeps a thread alive when its work is over and `threading` lists it no more, as a busy machine may."""

    def __init__(self) -> None:
        self.over, self.may_go, self.gone = threading.Event(), threading.Event(), threading.Event()
        self._local = threading.local()

    def keep(self) -> None:
        """Keep the thread that calls this: what it holds is let go last."""
        if not hasattr(self._local, "held"):
            self._local.held = _Held(self)


class _Held:
    def __init__(self, by: Lingering) -> None:
        self._by = by

    def __del__(self) -> None:
        self._by.over.set()
        self._by.may_go.wait(60)
        self._by.gone.set()


@contextmanager
def overwritten(step: int) -> Iterator[list[str]]:
    """Overwrite every tensor that a checkpoint was made of as soon as `save` returns. The tensors' names."""
    names: list[str] = []
    real = Saver.save

    def save(self: Saver, at: int, state: dict[str, Any], **more: Any) -> None:
        tensors: dict[str, Tensor] = {}
        for key, value in state.items():
            split(value, key, tensors)
        real(self, at, state, **more)
        if at == step:
            for name, tensor in tensors.items():
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                local.fill_(1)  # finite, so that the run can go on to its end
                names.append(name)

    with patch.object(Saver, "save", save):
        yield names


def contents(checkpoint: Path) -> dict[str, str]:
    """The hash of a checkpoint's files, by name; of those that hold state."""
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    kind, files = manifest["hash"], manifest["files"]
    return {name: entry[kind] for name, entry in files.items() if name not in ("config.toml", "plugins.json")}

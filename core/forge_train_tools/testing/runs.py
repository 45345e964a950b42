"""`run_forge`: a tiny training in this process."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forge_train.base.errors import ConfigError
from forge_train.base.names import canonical
from forge_train.contract.events import Finished
from forge_train.mesh.world import World
from forge_train.plugin.calls import implemented
from forge_train.plugin.plugin import Plugin
from forge_train.registry.discovery import discover, is_name, load, plugin_name
from forge_train.registry.setup import Setup
from forge_train.run import records
from forge_train_kit.plugins import find

from ..configuration.request import Request
from ..configuration.setup import resolve
from ..process import unchanged
from . import tiny
from .environment import installed

if TYPE_CHECKING:
    import torch

    from forge_train.contract.model import Model
    from forge_train.plugin.job import Job

Wanted = Iterable[str | type[Plugin]]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class TinyRun:
    """A finished training."""

    finished: Finished
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    events: list[dict[str, Any]]
    """The lines of events.jsonl."""
    job: Job
    model: Model
    optimizer: torch.optim.Optimizer

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.finished.run

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics]

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """The metrics without timings: what an equal run repeats bit for bit."""
        return [
            {
                key: value
                for key, value in line.items()
                if key not in {"timing", *records.TIMINGS, *line.get("timing", ())}
            }
            for line in self.metrics
        ]

    def plugin(self, name: str) -> Any:
        """The instance of an enabled plugin."""
        return self.job.hooks.plugins[canonical(name)]


class RunForge(Protocol):
    """The type of the fixture `run_forge`: as the function, its folder given."""

    def __call__(
        self,
        plugins: Wanted = (),
        config: Settings | None = None,
        *,
        steps: int = 3,
        without: Iterable[str] = (),
        sets: Iterable[str] = (),
        preset: str = tiny.PRESET,
        name: str = "",
        resume: str = "auto",
        stop_at: int | None = None,
        folder: Path = ...,
    ) -> TinyRun: ...


def run_forge(
    plugins: Wanted = (),
    config: Settings | None = None,
    *,
    steps: int = 3,
    without: Iterable[str] = (),
    sets: Iterable[str] = (),
    preset: str = tiny.PRESET,
    name: str = "",
    resume: str = "auto",
    stop_at: int | None = None,
    folder: Path | None = None,
) -> TinyRun:
    """Train something tiny, in this process and within about a second once torch is loaded.

    The preset `tiny`, which exists here only: a decoder of 20 thousand weights, 4 sequences of 32 bytes a step in two
    micro-batches, every step logged, without the plugins that only watch.

    Args:
        plugins: names, or classes, which need not be installed.
        config: as in a TOML file: sections, or dotted keys: `{"train.global_batch": 8, "lion": {"lr": 1e-3}}`.
        steps: `train.steps`.
        without: plugins to leave out.
        sets: as `--set`.
        preset: the preset beneath `config`; empty for none but the one beneath everything.
        name: as `--name`.
        resume: as `--resume`.
        stop_at: stop after this step, as a SIGTERM during it would.
        folder: as `--run-dir`; a temporary one by default, which goes when the process ends.

    Raises:
        ForgeError: as `forge train` would show it; anything a plugin raises.
    """
    from forge_train.engine import train

    from .seen import Seen

    folder = folder or _temporary()
    with (
        prepared(plugins, config, steps=steps, without=without, sets=sets, preset=preset, name=name, folder=folder) as (
            setup
        ),
        unchanged(),
    ):
        seen = Seen(stop_at)
        finished = train(setup, run_dir=folder, resume=resume, watcher=seen)
        if seen.stepper is None:
            raise ConfigError(f"{finished.run}: {finished.reason}; give run_forge another name or folder.")
        metrics, events = (list(records.read(finished.run / f"{name}.jsonl")) for name in ("metrics", "events"))
        return TinyRun(finished, metrics, events, seen.stepper.job, seen.stepper.model, seen.stepper.optimizer)


@contextmanager
def prepared(
    plugins: Wanted = (),
    config: Settings | None = None,
    *,
    steps: int = 3,
    without: Iterable[str] = (),
    sets: Iterable[str] = (),
    preset: str = tiny.PRESET,
    name: str = "",
    folder: Path,
) -> Iterator[Setup]:
    """Resolve the setup that `run_forge` trains; its plugins stay installed while the block lasts."""
    own = folder / ".testing"
    own.mkdir(parents=True, exist_ok=True)
    with installed() as found:
        names = [plugin if isinstance(plugin, str) else found.add(plugin) for plugin in plugins]
        unwatched = [one for one in tiny.base_plugins() if plugin_name(one) not in map(plugin_name, names)]
        with tiny.preset(own, _filled(names)):
            request = Request(
                config=str(_write(own, preset, {"run": {"name": name}, "train": {"steps": steps}}, config)),
                plugins=tuple(names),
                without=(*unwatched, *without),
                set=tuple(sets),
            )
            yield resolve(request, world=World.here().size)


def _filled(names: Iterable[str]) -> set[str]:
    """The slots that plugins fill; those that can't be imported are left for core to complain about."""
    known = {found.name: found for found in discover()}
    filled: set[str] = set()
    for name in names:
        try:
            found = known.get(canonical(name)) if is_name(name) else find(name)
            filled |= implemented(load(found)) if found else set()
        except ConfigError:
            continue
    return filled


def merged(*layers: Settings | None) -> dict[str, Any]:
    """Settings laid over each other, as nested tables."""
    table: dict[str, Any] = {}
    for layer in layers:
        for key, value in (layer or {}).items():
            _put(table, key.split("."), value)
    return table


def _write(folder: Path, preset: str, *layers: Settings | None) -> Path:
    """A configuration file of its own for every run, so that messages can name its lines."""
    import tomlkit

    file = Path(tempfile.mkdtemp(dir=folder)) / "tiny.toml"
    table = merged(*layers)
    file.write_text(tomlkit.dumps({"preset": preset, **table} if preset else table), encoding="utf-8")
    return file


def _put(table: dict[str, Any], path: list[str], value: Any) -> None:
    if isinstance(value, Mapping):
        if len(path) == 1:
            table.setdefault(path[0], {})
        for key, inner in value.items():
            _put(table, [*path, *str(key).split(".")], inner)
        return
    for part in path[:-1]:
        table = table.setdefault(part, {})
    table[path[-1]] = list(value) if isinstance(value, tuple) else value


def _temporary() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="forge-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder

"""Opens a run or a checkpoint to inspect its model: on one process, without training or writing anything."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError, brief
from forge_train.base.names import canonical
from forge_train.checkpoint import checkpoint
from forge_train.compose.compose import compose
from forge_train.compose.initialise import allocate
from forge_train.config import differences
from forge_train.contract.model import Model
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Device, Layout
from forge_train.mesh.process_group import choose_device
from forge_train.plugin.calls import implemented
from forge_train.plugin.job import Job
from forge_train.registry.discovery import discover, load, plugin_name
from forge_train.registry.setup import Setup
from forge_train.run.run import is_run
from forge_train_kit import foreign
from forge_train_kit.hf.folder import is_hugging_face
from forge_train_kit.starting import load_initial
from forge_train_kit.stored import load_weights

from ..configuration.request import Request, added_axes, lay
from ..configuration.setup import resolve
from .asked_plugins import check_asked
from .hf_request import starting_from
from .of_packages import answering_others, of_gone_packages
from .read_only import ReadOnlyRun


@dataclass(frozen=True)
class Opened:
    """A model with a checkpoint's weights."""

    job: Job
    model: Model
    path: Path
    """The checkpoint, or the folder in Hugging Face layout."""
    step: int
    tokens: int
    adapters: tuple[Path, ...] = ()
    """Folders of PEFT that were added to the weights."""


def open_model(
    path: Path,
    *,
    device: Device | None = None,
    text: bool = True,
    plugins: tuple[str, ...] = (),
    settings: tuple[str, ...] = (),
) -> Opened:
    """The model of a run (its newest whole checkpoint), of a checkpoint or of a Hugging Face folder, with its weights,
    on this process alone.

    The plugins are those that it was trained with, except those that change no number. Nothing is written.

    Args:
        path: a run, a checkpoint, or a folder in Hugging Face layout.
        device: the device to use; by default the one it was trained on, or else one of this machine.
        text: whether the tokenizer is needed. Weights alone can be opened even if the tokenizer is gone.
        plugins: to enable too, such as an attention kernel that it needs.
        settings: values to override, as `--set` takes them.

    Raises:
        ConfigError: for a path that is none of these, a plugin that is not installed, or a checkpoint of another model.
    """
    source = find(path, wanted=Wanted(plugins, settings, data=False))
    Layout.of(source.setup.config.parallel, 1)  # that of training is left out: only `settings` can ask for another
    job = lone_job(source.setup, source.path, device)
    model = compose_meta(job, text=text)
    for part in model.parts:
        allocate(part, job.device)
    source.load(model, job)
    model.train(False)
    return Opened(job, model, source.path, source.step, source.tokens)


@dataclass(frozen=True)
class Wanted:
    """Requests in addition to the configuration of a checkpoint."""

    plugins: tuple[str, ...] = ()
    set: tuple[str, ...] = ()
    data: bool = True
    """False leaves data unopened."""
    left_out: tuple[str, ...] = ()
    """Keys to leave out of the configuration."""
    without: tuple[str, ...] = ()
    """Plugins to leave out."""
    environment: str = field(default_factory=lambda: os.environ.get("FORGE_SET", ""))
    """The value of FORGE_SET, which is weaker than `set`."""


_NOTHING = Wanted(environment="")


@dataclass(frozen=True)
class Source:
    """Weights on disk, and the configuration of their model."""

    path: Path
    """A checkpoint, or a folder in Hugging Face layout."""
    setup: Setup
    saved: Mapping[str, Any] | None
    """The checkpoint's state; None for a folder."""

    @property
    def step(self) -> int:
        return self.saved["progress"]["step"] if self.saved is not None else 0

    @property
    def tokens(self) -> int:
        return self.saved["progress"]["tokens"] if self.saved is not None else 0

    def load(self, model: Model, job: Job) -> None:
        """Fill a composed model whose memory is allocated."""
        if self.saved is None:
            load_initial(model, job)
        else:
            load_weights(model, job, self.path, base=job.config.train.init_from)


def find(path: Path, *, world: int = 1, wanted: Wanted | None = None) -> Source:
    """Open what a path names: a run's newest whole checkpoint, a checkpoint, or a folder in Hugging Face layout.

    Args:
        path: a run, a checkpoint or a folder.
        world: see `setup_of`; so is `wanted`.

    Raises:
        ConfigError: for a path that is none of these, and as in `setup_of`.
    """
    more = wanted or _NOTHING
    if is_hugging_face(path):
        opened = wanted is None or not wanted.data
        asked = Request(model_from=str(path), plugins=more.plugins, set=more.set, environment=more.environment)
        request = starting_from(asked)
        source = Source(path, resolve(request, world=world, data=not opened, opened=opened, measured=False), None)
    else:
        path = foreign.resolve(path)
        saved = checkpoint.read_state(path)
        source = Source(path, setup_of(path, saved, world=world, wanted=wanted, measured=False), saved)
    if not more.data:
        check_asked(source.setup, more.plugins)
    return source


def setup_of(
    path: Path, saved: Mapping[str, Any], *, world: int = 1, wanted: Wanted | None = None, measured: bool = True
) -> Setup:
    """The configuration and the plugins that a checkpoint was saved with, without plugins that change no number.

    Args:
        path: the checkpoint.
        saved: its state.
        world: number of processes; several of them share the data, by the default data-parallel plugin.
        wanted: what to add, such as data for an evaluation; without it, the model is only inspected.
        measured: whether the data is opened to count the steps of `train.epochs`, which an evaluation does not need.

    Raises:
        ConfigError: naming what is no longer installed or has changed.
    """
    file = str(path / "config.toml")
    tree = lay(Request(config=file))
    asked = [spec for key in ("plugins",) for spec in _names(tree.values.get((key,)))]
    kept = {entry["name"] for entry in saved["enabled"]}
    for key in (gone := list(of_gone_packages(tree, kept))):
        del tree.values[key]
    defaults = [value.value for value in tree.below(("defaults",)).values() if isinstance(value.value, str)]
    named = {plugin_name(spec) for spec in (*asked, *defaults)} - {""}
    already = {canonical(name) for name in _names(tree.values.get(("without",)))}
    needed = {value.value for value in tree.below(("defaults", "distributed")).values()} if world > 1 else set()
    needed.add(tree.values[("defaults", "executor")].value)  # changes no number, and another plugin may have filled it
    asked_for = wanted or _NOTHING
    if asked_for.data and wanted is not None:
        needed |= set(answering_others(named - kept))
    more = {plugin_name(spec) for spec in asked_for.plugins}
    request = Request(
        config=file,
        plugins=asked_for.plugins,
        without=tuple(sorted({*(named - kept - already - needed - more), *asked_for.without})),
        set=asked_for.set,
        environment=asked_for.environment,
        left_out=(*(".".join(key) for key in gone), *asked_for.left_out),
        sections={"parallel": {**dict.fromkeys(added_axes(tree), 1), **Layout(dp_shard=-1 if world > 1 else 1).axes()}},
        sections_from="the processes of this command",
        foreign=str(run_folder(path)),
    )
    try:
        training = wanted is not None and wanted.data
        setup = resolve(request, world=world, training=training, opened=not training, measured=measured)
    except ConfigError as error:
        why = "can't be opened" if error.where.key else "can't be opened with the plugins that are installed now"
        if error.where.key.startswith("parallel."):
            why = f"can't be opened on {world} process{'es' * (world > 1)}"
        raise ConfigError(f"{path} {why}:\n{error}") from error
    if edits := list(_edited(setup, saved, asked_for.without)):
        raise ConfigError(
            f"{path}: holds another model than its config.toml describes:\n  "
            + "\n  ".join(edits)
            + "\nPut the values back in that file, or use --set where the command has it."
        )
    return setup


_MODEL = {"build_model", "attention", "feed_forward", "head", "tail", "parallelize"}
"""Hooks whose plugins decide what a model computes from its weights."""


def _edited(setup: Setup, saved: Mapping[str, Any], without: Collection[str]) -> Iterator[str]:
    """Values of the model that are other ones than those sealed in the checkpoint, without those of `--set`, and of
    plugins that are left out on purpose.

    A value that this forge or the one that saved the checkpoint does not know is left out.
    """
    sealed: Mapping[str, Any] = saved.get("config", {})
    enabled = setup.hooks.enabled
    known = {found.name: found for found in discover()}
    for name in (entry["name"] for entry in saved["enabled"] if sealed):
        if name not in {*enabled, *without} and name in known and implemented(load(known[name])) & _MODEL:
            yield f"{name}: plugin enabled when it was saved, not now"
    of_model = {name for name, one in enabled.items() if not one.neutral and implemented(one.cls) & _MODEL}
    asked = {key for key, origin in setup.config.origins.items() if origin.kind in ("--set", "FORGE_SET", "plugin")}
    for key, then, now in differences(sealed, setup.config.values(volatile=False)):
        section, _, name = key.partition(".")
        if section in of_model and key in sealed and then is not None and now is not None:
            yield from _apart((section, name), then, now, asked)


def _apart(key: tuple[str, ...], then: Any, now: Any, asked: Set[tuple[str, ...]]) -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for name in sorted(then.keys() & now.keys()):
            yield from _apart((*key, name), then[name], now[name], asked)
    elif then != now and not any(key[: len(one)] == one for one in asked):
        yield f"{'.'.join(key)}: {brief(repr(then))} when it was saved, {brief(repr(now))} now"


def lone_job(setup: Setup, path: Path, device: Device | None = None) -> Job:
    """A job of one process that ignores launchers and writes nothing.

    Raises:
        ConfigError: if the requested device does not exist here.
    """
    try:
        chosen = choose_device(device or setup.config.run.device)
    except ConfigError:
        if device:
            raise
        chosen = choose_device("auto")
    return Job.of(setup.config, setup.hooks, ReadOnlyRun(run_folder(path)), DistributedContext(Layout(), chosen))


def run_folder(path: Path) -> Path:
    """The run of a checkpoint; the checkpoint itself if it is outside of a run."""
    return path.parent.parent if is_run(path.parent.parent) else path


def compose_meta(job: Job, *, text: bool) -> Model:
    """The composed model, on the meta device.

    Args:
        job: a job of one process.
        text: whether the tokenizer is needed. If not, a tokenizer that is gone or does not fit the model is left out.

    Raises:
        ConfigError: if the model can't be composed.
    """
    try:
        return compose(job, allocate=False, extra=False).model
    except ConfigError as error:
        if text or job.hooks.provider("tokenizer") is None:
            raise
        job.hooks.vacate("tokenizer")
        try:
            return compose(job, allocate=False, extra=False).model
        except ConfigError:
            raise error from None


def _names(value: Any) -> list[str]:
    found = value.value if value is not None else []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []

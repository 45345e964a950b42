"""The Python API: what `forge train`, `plan`, `verify`, `generate` and `runs` do, as functions.

`config`, `set`, `plugins` and `without` mean what they mean on the command line, and `FORGE_SET` counts too. Errors are
`forge_train.ForgeError`. Random numbers, torch's settings, logging and the environment are afterwards as before.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from forge_train.base.errors import ConfigError

from .messages import show_end, shown
from .process import alone, unchanged
from .run_folder import RunFolder
from .sources import RUN_DIR, as_assignments, fetch, hugging_face, with_configuration

if TYPE_CHECKING:
    from forge_train.mesh.layout import Device

    from .configuration.request import Request
    from .inference.infer import InferenceOptions, Inferred
    from .offline.trained_model import TrainedModel
    from .planning import Plan
    from .verification import Verdict


def train(
    config: str | Path = "",
    set: Mapping[str, Any] | None = None,
    *,
    plugins: Iterable[str] = (),
    without: Iterable[str] = (),
    model_from: str | Path = "",
    name: str = "",
    resume: str | Path = "auto",
    run_dir: str | Path = RUN_DIR,
    nproc: int | Literal["auto"] = 1,
    quiet: bool = False,
) -> RunFolder:
    """Train, and return the run: its metrics, events, configuration and outcome.

    An interrupt (the first Ctrl-C, or a notebook's stop button) saves the run and returns it with the outcome
    `interrupted`, if the caller is the main thread.

    Args:
        config: a TOML file, a preset's name, or a Hugging Face folder; by default that of the run to resume, or else
            the preset quickstart.
        set: values to override, by dotted key (`{"train.steps": 20}`) or by section (`{"train": {"steps": 20}}`).
        plugins: plugins to enable too: names, `package.module:Class`, or `./file.py`.
        without: plugins to disable.
        model_from: a Hugging Face folder, a run or a checkpoint, whose model is trained further (`--from`).
        name: name of the run; repeating the call continues it.
        resume: `auto`, `never`, or the path or address of a run or a checkpoint.
        run_dir: where run folders are made.
        nproc: processes to train on: 1 is this one, and under torchrun or Slurm one of theirs; more are started here;
            `auto` starts one for each CUDA device.
        quiet: whether to show only warnings.

    Raises:
        ConfigError: for mistakes in the configuration, all of them at once.
        DivergedError: if training diverged.
        ForgeError: for anything else that has one clear message.
    """
    folder = Path(run_dir)
    with _working(progress=not quiet):
        from forge_train.registry.discovery import plugin_name

        from .configuration.setup import resolve
        from .launching.world import here

        source = fetch(str(resume), folder)
        asked = _request(config, set, plugins, without, model_from, name)
        request = hugging_face(with_configuration(asked, source), folder, _say)
        count = _processes(nproc, request)
        setup = resolve(request, world=count if count > 1 else here().size)
        if quiet:
            setup.hooks.mute("console")
        notable = tuple(sorted(plugin_name(spec) for spec in request.plugins))
        if count > 1:
            from .launching.training import train_several

            launched = train_several(
                request, setup, run_dir=folder, resume=source, notable=notable, nproc=count, quiet=quiet
            )
            launched.ended.check()
            finished = launched.finished
        else:
            from forge_train.engine import train as train_here

            finished = train_here(setup, run_dir=folder, resume=source, notable=notable)
        if not quiet and here().rank == 0:
            show_end(finished)
        return RunFolder(finished.run)


def plan(
    config: str | Path = "",
    set: Mapping[str, Any] | None = None,
    *,
    plugins: Iterable[str] = (),
    without: Iterable[str] = (),
    model_from: str | Path = "",
    world: int = 1,
    nodes: int = 0,
    device: str | None = None,
) -> Plan:
    """Compose for `world` processes and rehearse a step, without memory or devices: what each plugin matched, meshes,
    parameters, memory, communication.

    Args:
        config: as in `train`; so are `set`, `plugins`, `without` and `model_from`.
        world: number of processes.
        nodes: number of nodes that they are on; by default as many as hold 8 processes each.
        device: a device to estimate the speed on, as `h100`.

    Raises:
        ConfigError: for a composition that can't be.
    """
    with _working():
        from . import planning
        from .configuration.setup import resolve

        setup = resolve(_complete(_request(config, set, plugins, without, model_from)), world=world, data=False)
        return planning.plan(setup, world=world, nodes=nodes, device=device)


def verify(
    config: str | Path = "",
    set: Mapping[str, Any] | None = None,
    *,
    plugins: Iterable[str] = (),
    without: Iterable[str] = (),
    model_from: str | Path = "",
    nproc: int | None = None,
    steps: int = 5,
    against: str | None = None,
) -> Verdict:
    """Take the same steps on one process and on `nproc`, and compare losses, gradients, updates and batches.

    Args:
        config: as in `train`; so are `set`, `plugins`, `without` and `model_from`.
        nproc: number of processes of the layout, 2 by default.
        steps: how many steps to take.
        against: another setting to compare instead of another layout, as `precision=bf16`.

    Returns:
        A verdict: `verdict.agree`, and `verdict.checks` with the largest difference and the tolerance of each.

    Raises:
        ForgeError: if one of the two sides can't be run.
    """
    with _working():
        from . import verification

        verification.check_sides(nproc, against)
        request = _complete(_request(config, set, plugins, without, model_from))
        return verification.verify_request(request, nproc, steps=steps, against=against)


def open_model(
    path: str | Path | RunFolder,
    *,
    device: Device | None = None,
    plugins: Iterable[str] = (),
    set: Mapping[str, Any] | None = None,
    adapters: Mapping[str, float] | None = None,
) -> TrainedModel:
    """Open a trained model in this process, to write text with it or to look at its logits.

    Args:
        path: a run (its newest whole checkpoint), a checkpoint, or a Hugging Face folder.
        device: `cpu`, `cuda` or `mps`; by default the one it was trained on, or else one of this machine.
        plugins: plugins to enable too, as an attention kernel that it needs.
        set: values to override, as in `train`.
        adapters: folder of PEFT → factor: what each adds to the weights, times the factor, is added.

    Raises:
        ConfigError: for a path that is none of these, a plugin that is not installed, or an adapter of another model.
    """
    with _working():
        from .offline import opening
        from .offline.adapted import add_adapters
        from .offline.trained_model import TrainedModel

        place = path.path if isinstance(path, RunFolder) else Path(path)
        settings = tuple(as_assignments(set or {}))
        opened = opening.open_model(place, device=device, plugins=tuple(plugins), settings=settings)
        if adapters:
            add_adapters(opened, adapters, tuple(plugins))
            opened = replace(opened, adapters=tuple(map(Path, adapters)))
        return TrainedModel(opened)


def infer(
    path: str | Path | RunFolder,
    data: Iterable[str | Path],
    out: str | Path,
    *,
    outputs: Iterable[str] = (),
    plugins: Iterable[str] = (),
    set: Mapping[str, Any] | None = None,
    nproc: int = 1,
    **options: Unpack[InferenceOptions],
) -> Inferred:
    """Write what a trained model gives for each record of a data set, in the order of the records.

    The same call continues what was stopped.

    Args:
        path: a run, a checkpoint, or a Hugging Face folder.
        data: files, folders, patterns or addresses.
        out: the file to write, which does not exist: .jsonl, .parquet or .safetensors.
        outputs: their names; by default what fits the model's head.
        plugins: plugins to enable too.
        set: values to override, as in `train`.
        nproc: local processes to use, including this one.
        options: `field`, `long`, `template` and `batch`, as in `forge infer`.

    Raises:
        ConfigError: for a path, a record, an output or a file that can't be, before anything is computed.
    """
    with _working():
        from .inference.infer import Inference
        from .inference.infer import infer as run

        place = path.path if isinstance(path, RunFolder) else Path(path)
        asked = Inference(
            path=place,
            data=tuple(map(str, [data] if isinstance(data, (str, Path)) else data)),
            out=Path(out),
            outputs=tuple(outputs),
            plugins=tuple(plugins),
            set=tuple(as_assignments(set or {})),
            **options,
        )
        return run(asked, nproc=nproc)


@contextmanager
def _working(*, progress: bool = False) -> Iterator[None]:
    """Nothing else of Forge works in this process meanwhile, and afterwards the process is as before."""
    with alone(), shown(progress=progress), unchanged():
        yield


def _request(
    config: str | Path,
    values: Mapping[str, Any] | None,
    plugins: Iterable[str],
    without: Iterable[str],
    model_from: str | Path,
    name: str = "",
) -> Request:
    from .configuration.request import Request

    for key, names in (("plugins", plugins), ("without", without)):
        if isinstance(names, str):
            raise ConfigError(f"{key}: expected a list of names, found {names!r}; write [{names!r}].")
    own = {"run.name": name} if name else {}
    return Request(
        config=str(config),
        plugins=tuple(plugins),
        without=tuple(without),
        set=tuple(as_assignments({**(values or {}), **own})),
        environment=os.environ.get("FORGE_SET", ""),
        model_from=str(model_from),
    )


def _complete(request: Request) -> Request:
    """The request with a configuration, and with the model of its Hugging Face folder."""
    return hugging_face(with_configuration(request, ""), Path(RUN_DIR), _say)


def _processes(nproc: int | Literal["auto"], request: Request) -> int:
    from .launching.devices import how_many
    from .launching.launch import check_alone

    if nproc == "auto":
        return how_many(request)
    if nproc < 1:
        raise ConfigError(f"nproc: expected at least 1 or 'auto', found {nproc}.")
    if nproc > 1:
        check_alone(f"--nproc {nproc}")
    return nproc


def _say(text: str) -> None:
    import logging

    logging.getLogger("forge_train.progress").info(text)

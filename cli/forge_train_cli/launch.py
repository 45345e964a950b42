"""`forge launch`."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_train.base.errors import ConfigError
from forge_train_tools.sources import PRESET, RUN_DIR

from . import screen
from .options import hugging_face, named, run_dir_option, run_options

if TYPE_CHECKING:
    from forge_train.config.tree import Key, Value
    from forge_train_tools.configuration.request import Request
    from forge_train_tools.launchers.job import ClusterJob
    from forge_train_tools.launchers.launcher import Launcher

OWN = "own__"
"""Before the parameters of a launcher's own section."""
ACTIONS = {"status": "Show the job that was submitted last.", "logs": "Print its log.", "cancel": "Cancel it."}


class Launchers(click.Group):
    """A command for each launcher, with an option for each field of its section; imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from forge_train_tools.launchers.launcher import points

        return list(points())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from forge_train_tools.launchers.launcher import find

        return _command(cmd_name, find(cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """click's own method would import every launcher."""
        from forge_train_tools.launchers.launcher import points

        with formatter.section("Launchers"):
            formatter.write_dl([(name, f"from {ones[0].value.partition(':')[0]}") for name, ones in points().items()])


@click.group(cls=Launchers, short_help="Train on a cluster.")
def launch() -> None:
    """Train on a cluster: write a job in the cluster's own files, and submit it.

    A launcher is a plugin; `forge launch NAME --help` has its options.
    """


def _command(name: str, kind: type[Launcher]) -> click.Command:
    """The command of a launcher."""
    from forge_train_tools.launchers.job import Machines
    from forge_train_tools.launchers.launcher import Launcher

    def call(request: Request, run_dir: str, job: str, out: str, **more: Any) -> int:
        more["name"] = _name(more.pop("run_name"))
        action = next((one for one in ACTIONS if more.pop(one, False)), "")
        if action:
            return _act(name, action, Path(out), more["name"] or Path(request.config).stem)
        submit, dry = more.pop("submit"), more.pop("dry_run")
        return _launch(name, kind, request, Path(run_dir), job, Path(out), submit, dry, more)

    call.__doc__ = kind.__doc__
    shared, own = list(_options(Machines)), list(_options(kind.Options, OWN, kind.rest))
    actions = [
        click.Option([f"--{action}"], is_flag=True, help=text)
        for action, text in ACTIONS.items()
        if getattr(kind, action) is not getattr(Launcher, action)
    ]
    fixed = [
        click.Option(["--name", "run_name"], metavar="NAME", help="The run is DIR/NAME; by default CONFIG's name."),
        click.Option(["--job"], default="", metavar="FILE", help="A TOML file with [launch], below these options."),
        click.Option(["--out", "-o"], default=".", metavar="FOLDER", help="Folder for the files."),
        click.Option(["--dry-run"], is_flag=True, help="Print the files, and write nothing."),
        click.Option(["--submit"], is_flag=True, help="Submit the job."),
        *actions,
    ]
    made = click.command(name, help=_help(name, kind))(run_options(default="")(run_dir_option(call)))
    made.params += [*own, *shared, *fixed]
    return made


def _help(name: str, kind: type[Launcher]) -> str:
    rest = f" {kind.rest.upper().removesuffix('S')}…" if kind.rest else ""
    return (
        f"Check CONFIG as `forge train` would, and write the files of a job that trains it. {kind.__doc__}\n\n"
        f"\b\nforge launch {name} my.toml{rest} --nproc 8 --dry-run"
    )


def _options(section: type, prefix: str = "", rest: str = "") -> Iterator[click.Parameter]:
    """An option for each field of a section; the parameter has its name, after a prefix."""
    from forge_train.config.schema import members_of
    from forge_train_tools.configuration.comments import field_docs

    docs, hints = field_docs(section), typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        kinds = {typing.get_origin(one) or one for one in members_of(hints[field.name])}
        key, option = prefix + field.name, f"--{field.name.replace('_', '-')}"
        text = docs.get(field.name, "")
        if field.name == rest:
            yield click.Argument([key], nargs=-1, metavar=f"[{rest.upper().removesuffix('S')}]...")
        elif bool in kinds:
            yield click.Option([f"{option}/--no{option[1:]}", key], default=None, help=text)
        elif dict in kinds:
            yield click.Option([option, key], multiple=True, metavar="NAME=VALUE", help=text)
        elif tuple in kinds:
            yield click.Option([option, key], multiple=True, metavar="VALUE", help=text)
        else:
            yield click.Option([option, key], metavar="VALUE", help=text)


def _name(name: str | None) -> str:
    return named(name).partition("=")[2] if name is not None else ""


def _typed(options: Mapping[str, Any], launcher: str, own: type) -> Iterator[tuple[Key, Value]]:
    """Values of the options that were typed, by key path."""
    from forge_train.config.schema import members_of
    from forge_train.config.tree import Origin, Value
    from forge_train_tools.configuration.typed import read_text
    from forge_train_tools.launchers.job import Machines

    for parameter, given in options.items():
        name = parameter.removeprefix(OWN)
        section, path = (Machines, ()) if name == parameter else (own, (launcher,))
        origin, key = Origin("--set", f"--{name.replace('_', '-')}"), (*path, name)
        kind = members_of(typing.get_type_hints(section)[name])[0]
        if given is None or given == ():
            continue
        if typing.get_origin(kind) is dict:
            for one in given:
                name, _, value = one.partition("=")
                yield (*key, name.strip().removeprefix("--")), Value(value.strip(" "), origin)
        elif isinstance(given, tuple):
            yield key, Value(list(given), origin)
        else:
            yield key, Value(given, origin, read_text if isinstance(given, str) else None)


def _launch(
    name: str,
    kind: type[Launcher],
    request: Request,
    run_dir: Path,
    job_file: str,
    out: Path,
    submit: bool,
    dry: bool,
    options: dict[str, Any],
) -> int:
    from forge_train_tools.launchers.job import described
    from forge_train_tools.launchers.launcher import points

    run = options.pop("name")
    chosen: Any
    machines, chosen = described(
        job_file, name, kind.Options, dict(_typed(options, name, kind.Options)), list(points())
    )
    launcher = kind(chosen)
    nodes = len(getattr(chosen, kind.rest)) if kind.rest else 0
    machines = dataclasses.replace(machines, nodes=max(machines.nodes, nodes))
    job = _checked(launcher, request, run_dir, run, machines)
    files = launcher.files(job)
    if dry:
        for file, text in files.items():
            click.echo(f"# {out / file}\n{text}", nl=False)
        return 0
    for file in files:
        screen.check_own(out / file, lambda begins: b"Written by forge" in begins, "a file written by forge launch")
    for file, text in files.items():
        screen.write(out / file, text)
        click.echo(f"Wrote {out / file}.")
    return _submit(name, launcher, job, out, out / next(iter(files)), really=submit)


def _submit(name: str, launcher: Launcher, job: ClusterJob, out: Path, file: Path, *, really: bool) -> int:
    import shlex

    from forge_train_tools.launchers.launcher import Submitted, client, record

    command = launcher.submit(job, file)
    if not really:
        click.echo(f"{'Run' if launcher.attached else 'Submit'} it with: {shlex.join(command)}")
        return 0
    if launcher.attached:
        os.execvp(command[0], list(command))
    if (asked := launcher.existing(job)) and (there := client(asked, file).split("\n")[0].strip()):
        raise ConfigError(f"There is a job {job.name!r} already: {there}. Cancel it, or choose another --name.")
    number = launcher.submitted(job, client(command, file))
    record(out, name, launcher, Submitted(job.name, number, job.folder))
    click.echo(f"Submitted as job {number}.")
    return 0


def _act(launcher: str, action: str, out: Path, name: str) -> int:
    """Do what is asked with the job that was submitted last under a name."""
    from forge_train_tools.launchers.launcher import client, recall

    made, job = recall(out, launcher, name)
    click.echo(client(getattr(made, action)(job)), nl=False)
    if action == "cancel":
        click.echo(f"Cancelled job {job.id}.")
    return 0


def _checked(launcher: Launcher, request: Request, run_dir: Path, name: str, machines: Any) -> ClusterJob:
    """The job, once the configuration of each of its runs is checked for its processes."""
    from forge_train_tools.configuration.setup import resolve
    from forge_train_tools.launchers.job import ClusterJob

    request = dataclasses.replace(request, config=request.config or ("" if request.model_from else PRESET))
    more = [plugin for plugin in launcher.plugins if plugin not in request.without]
    request = dataclasses.replace(request, plugins=tuple(dict.fromkeys((*request.plugins, *more))))
    own = (named(name),) if name else ()
    world = machines.nodes * machines.nproc
    for settings in launcher.variants():
        wanted = hugging_face(dataclasses.replace(request, set=(*request.set, *settings, *own)), str(run_dir))
        config = resolve(wanted, world=world, measured=False).config
    name = config.run.name or Path(request.model_from).name or config.source
    folder = Path(machines.folder) if machines.folder else Path.cwd()
    return ClusterJob(
        name=name,
        machines=machines,
        arguments=("train", *_arguments(request, str(run_dir), name)),
        folder=folder,
        run_dir=folder / run_dir,
        gpus=config.run.device != "cpu",
    )


def _arguments(request: Request, run_dir: str, name: str) -> Iterator[str]:
    """The arguments of `forge train` for a request; includes values of FORGE_SET, wherever the job is submitted."""
    from forge_train_tools.configuration.request import split_assignments

    if request.config:
        yield request.config
    if request.model_from:
        yield from ("--from", str(Path(request.model_from).absolute()))
    for option, names in (("--plugins", request.plugins), ("--without", request.without)):
        if names:
            yield from (option, ",".join(names))
    for value in (*split_assignments(request.environment), *request.set):
        yield from ("--set", value)
    if run_dir != RUN_DIR:
        yield from ("--run-dir", run_dir)
    yield from ("--name", name)

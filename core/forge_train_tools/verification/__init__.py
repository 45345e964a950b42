"""`forge verify`: the same few steps on one process and on a parallel layout, or with another setting, compared."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forge_train.base.errors import ConfigError
from forge_train.config import LENGTHS
from forge_train.config.sections import CORE_SECTIONS
from forge_train.mesh.layout import Layout
from forge_train.registry.setup import Setup
from forge_train_kit.format import format_plural

from ..configuration.request import Request, lay, one_process
from ..configuration.setup import resolve
from ..facts import ROUNDS
from ..launching.launch import WorkerCommand, check_alone, launch
from ..messages import passing
from .verdict import Check, Offender, Verdict

if TYPE_CHECKING:
    from .recording import Recording

WORKER = "forge_train_tools.verification.record:worker"
EXACT = "train.precision=fp32"
LOGGED = "log.every=1"
"""So that what plugins observe at logged steps alone is compared, too."""


class Start(Protocol):
    """Has `nproc` processes call `forge_train_tools.verification.record.worker`, and returns when all have."""

    def __call__(self, nproc: int, arguments: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Reference:
    """Reference of one process, by which layouts of the same model and data are judged."""

    request: Request
    steps: int
    recording: Recording
    exact: Recording | None = None
    """In fp32, where the precision is narrow or a plugin rounds below it; without such plugins."""

    @classmethod
    def take(cls, request: Request, steps: int = 5) -> Reference:
        """Take the steps on this process."""
        passing(f"one process: {format_plural(steps, 'step')}")
        alone = _alone(request)
        recording = _recorded(alone, steps)
        narrow = recording.narrow or _rounds(alone)
        exact = _recorded(_alone(request, EXACT), steps, rounding=False) if narrow else None
        return cls(request, steps, recording, exact)


def check_sides(nproc: int | None, against: str | None) -> None:
    """Check that there are two sides to compare, and that this process may start others.

    Raises:
        ConfigError: if not.
    """
    check_alone("forge verify")
    if against is not None and nproc is not None:
        raise ConfigError("--against compares two settings on one process; leave --nproc out.")
    if nproc is not None and nproc < 2:
        raise ConfigError(f"--nproc {nproc} would compare one process with itself; expected at least 2.")


def verify_request(request: Request, nproc: int | None, *, steps: int = 5, against: str | None = None) -> Verdict:
    """Compare a layout of `nproc` processes, by default 2, with one process; or two settings, if `against` names one.

    A configuration without a length is as long as the comparison.

    Raises:
        ForgeError: as `verify` and `verify_against` do.
    """
    if not {("train", key) for key in LENGTHS} & lay(request).values.keys():
        request = dataclasses.replace(request, set=(*request.set, f"train.steps={steps}"))
    if against is not None:
        return verify_against(request, against, steps=steps)
    return verify(request, nproc or 2, steps=steps)


def launched(nproc: int, arguments: dict[str, Any], layout: Layout | None = None) -> None:
    """Start processes of their own; a failure tells where in the layout they lie.

    Raises:
        ForgeError: with the message of the rank that failed first; the folder stays, for the logs.
    """
    folder = Path(arguments["folder"])
    task = WorkerCommand(
        WORKER, arguments, folder=folder / "launch", logs=folder / "log", quiet=True, layout=layout or Layout()
    )
    launch(task, nproc).check()


def verify(
    request: Request, nproc: int, *, steps: int = 5, start: Start | None = None, reference: Reference | None = None
) -> Verdict:
    """Take the same steps on one process and on `nproc`, from the same weights and data, and compare them.

    Args:
        request: the configuration.
        nproc: the layout's number of processes.
        steps: how many to take.
        start: how the processes are had, if not by `launched`: they may be running already.
        reference: what one process gives, if that is known; by default it is taken here.

    Raises:
        ForgeError: if one of the two can't be run; its message is the one of the rank that failed first.
    """
    from .recording import Recording

    steps = reference.steps if reference else steps
    layout = resolve(request, world=nproc)
    train = layout.config.train
    if train.precision != "fp32" or _rounds(layout):  # batches of other sizes round differently
        request = dataclasses.replace(request, set=(*request.set, f"train.micro_batch={train.micro_batch}"))
    request = dataclasses.replace(request, set=(*request.set, LOGGED))
    folder = Path(tempfile.mkdtemp(prefix="forge-verify-"))
    passing(f"{nproc} processes: {format_plural(steps, 'step')}")
    start = start or partial(launched, layout=Layout.of(layout.config.parallel, nproc))
    start(nproc, {"request": dataclasses.asdict(request), "steps": steps, "folder": str(folder)})
    try:
        found = Recording.read(folder, layout, nproc)
        return _judge(found, reference or Reference.take(request, steps), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _judge(layout: Recording, reference: Reference, folder: Path) -> Verdict:
    """Go a layout's way on one process, and compare."""
    from .compare import Exact, compare
    from .explain import explain
    from .follow import follow, follow_exactly

    passing("comparing")
    request, exact, left = reference.request, None, None
    if reference.exact:
        left = folder / "exact"
        exact = Exact(reference.exact, follow_exactly(_alone(request, EXACT), folder, layout, left))
    followed = follow(
        _alone(request), folder, layout, exact=left, unclipped=lambda: _alone(request, "train.clip_norm=0")
    )

    def explained() -> str:
        try:
            return explain(_alone(request, f"train.micro_batch={layout.micro_batch}"), layout, folder / "explained")
        except ConfigError:  # a task may refuse, on one process, what one rank of several computes at a time
            return ""

    return compare(reference.recording, layout, followed, exact, explained)


def verify_against(request: Request, assignment: str, *, steps: int = 5) -> Verdict:
    """Take the same steps on one process with another value of one key, and compare them.

    Another `train.precision` stands for itself: plugins that round below it take no part on that side.

    Raises:
        ForgeError: for a key that is none, or if one of the two can't be run.
    """
    from .against import compare_settings

    key, equals, value = assignment.partition("=")
    if not equals:
        raise ConfigError(f"--against {assignment!r}: expected key=value, like precision=bf16.")
    key = _full_key(key.strip())
    if key.startswith("parallel."):
        raise ConfigError(f"--against {assignment!r}: compares on one process; layouts are compared with --nproc.")
    setup, rounding = _alone(request), key != "train.precision"
    passing(f"as configured: {format_plural(steps, 'step')}")
    one = _recorded(setup, steps)
    passing(f"with {key}={value}: {format_plural(steps, 'step')}")
    other = _recorded(_alone(request, f"{key}={value}"), steps, rounding=rounding)
    return compare_settings(one, other, f"{key}={value}", rounded=0.0 if rounding else _rounds(setup))


def _alone(request: Request, *more: str) -> Setup:
    """The same configuration on one process."""
    return resolve(dataclasses.replace(request, set=(*request.set, LOGGED, *one_process(request), *more)), world=1)


def _rounds(setup: Setup) -> float:
    """Return the coarsest rounding of any plugin below the run's precision; 0 if none rounds."""
    return max((ROUNDS.of(enabled.cls) for enabled in setup.hooks.enabled.values()), default=0.0)


def _recorded(alone: Setup, steps: int, *, rounding: bool = True) -> Recording:
    """Steps on this process."""
    from .record import record

    with tempfile.TemporaryDirectory(prefix="forge-verify-") as folder:
        recording = record(alone, steps, Path(folder), rounding=rounding)
    assert recording is not None
    return recording


def _full_key(key: str) -> str:
    """`precision` → `train.precision`; a key with a section stays."""
    if "." in key:
        return key
    owners = [
        f"{name}.{key}"
        for name, section in CORE_SECTIONS.items()
        if key in {field.name for field in dataclasses.fields(section)}
    ]
    if len(owners) != 1:
        raise ConfigError(f"--against {key}=…: say the section too, like train.precision.")
    return owners[0]


__all__ = [
    "Check",
    "Offender",
    "Reference",
    "Start",
    "Verdict",
    "check_sides",
    "launched",
    "verify",
    "verify_against",
    "verify_request",
]

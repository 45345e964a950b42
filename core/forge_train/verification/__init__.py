"""`forge verify`: the same few steps on one process and on a parallel layout, or with another setting, compared."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..config import Request
from ..config.sections import CORE_SECTIONS, ParallelSection
from ..errors import ConfigError, ForgeError
from ..processes.launch import Task, launch
from ..registry.setup import Setup, resolve

if TYPE_CHECKING:
    from .record import Recording
    from .routing import Parting

AXES = tuple(axis.name for axis in dataclasses.fields(ParallelSection))
WORKER = "forge_train.verification.record:worker"
EXACT = "train.precision=fp32"


@dataclass(frozen=True)
class Check:
    """One thing that must be the same."""

    name: str
    worst: float
    """The largest difference, as `says` explains; a count where equality is exact."""
    tolerance: float
    says: str
    where: str = ""
    """Where the largest difference is, if there is one."""

    @property
    def ok(self) -> bool:
        return self.worst <= self.tolerance


@dataclass(frozen=True)
class Offender:
    """A parameter whose first gradient is not what it should be."""

    name: str
    error: float
    """‖g − r‖ / ‖r‖, where r is the reference's."""
    ratio: float
    """⟨g, r⟩ / ⟨r, r⟩."""


@dataclass(frozen=True)
class Verdict:
    """What a comparison found."""

    title: str
    sides: tuple[str, str]
    """What the reference and the other side are called."""
    checks: tuple[Check, ...]
    losses: tuple[tuple[float, float], ...]
    """Of each step, reference first."""
    offenders: tuple[Offender, ...] = ()
    """Gradients beyond the tolerance, the worst first."""
    advice: tuple[str, ...] = ()
    """What the pattern suggests."""
    parting: Parting | None = None
    """The first choices that fell otherwise, where that is more than the other checks allow for."""

    @property
    def failed(self) -> set[str]:
        """Names of the checks that are not ok."""
        return {check.name for check in self.checks if not check.ok}

    @property
    def agree(self) -> bool:
        return not self.failed and self.parting is None

    @property
    def undecided(self) -> bool:
        """Whether nothing is wrong in what could be compared, and a tie kept the rest from it."""
        return not self.failed and self.parting is not None

    def as_json(self) -> dict[str, Any]:
        return {
            "agree": self.agree,
            "undecided": self.undecided,
            "checks": [
                {"name": c.name, "worst": c.worst, "tolerance": c.tolerance, "ok": c.ok, "where": c.where}
                for c in self.checks
            ],
            "losses": [list(pair) for pair in self.losses],
            "gradients": [dataclasses.asdict(offender) for offender in self.offenders],
            "parting": self.parting and self.parting.as_json(),
            "advice": list(self.advice),
        }


class Start(Protocol):
    """Has `nproc` processes call `forge_train.verification.record.worker`, and returns when all have."""

    def __call__(self, nproc: int, arguments: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Reference:
    """What one process gives: what layouts of the same model and data are judged by."""

    request: Request
    steps: int
    recording: Recording
    exact: Recording | None = None
    """In fp32, where the precision is narrow or a plugin rounds below it; without such plugins."""

    @classmethod
    def take(cls, request: Request, steps: int = 5) -> Reference:
        """Take the steps on this process."""
        alone = _alone(request)
        recording = _recorded(alone, steps)
        narrow = recording.precision != "fp32" or _rounds(alone)
        exact = _recorded(_alone(request, EXACT), steps, rounding=False) if narrow else None
        return cls(request, steps, recording, exact)


def launched(nproc: int, arguments: dict[str, Any]) -> None:
    """Start processes of their own.

    Raises:
        ForgeError: with the message of the rank that failed first; the folder stays, for the logs.
    """
    folder = Path(arguments["folder"])
    task = Task(WORKER, arguments, folder=folder / "launch", logs=folder / "log", quiet=True)
    ended = launch(task, nproc)
    if ended.signal:
        raise KeyboardInterrupt
    if complaint := ended.complaint():
        raise failure(ended.code, complaint)


def verify(
    request: Request, nproc: int, *, steps: int = 5, start: Start = launched, reference: Reference | None = None
) -> Verdict:
    """Take the same steps on one process and on `nproc`, from the same weights and data, and compare them.

    Args:
        request: the configuration.
        nproc: the layout's number of processes.
        steps: how many to take.
        start: how the processes are had; others than `launched` may have them running already.
        reference: what one process gives, if that is known; by default it is taken here.

    Raises:
        ForgeError: if one of the two can't be run; its message is the one of the rank that failed first.
    """
    from .compare import compare
    from .record import Recording, record

    steps = reference.steps if reference else steps
    layout = resolve(request, world=nproc)
    alone = _alone(reference.request if reference else request)
    folder = Path(tempfile.mkdtemp(prefix="forge-verify-"))
    start(nproc, {"request": dataclasses.asdict(request), "steps": steps, "folder": str(folder)})
    found = Recording.read(folder, layout, nproc)
    reference = reference or Reference.take(request, steps)
    loaded = record(alone, 0, folder / "loaded", compare_with=folder / "checkpoint")
    assert loaded is not None
    shutil.rmtree(folder, ignore_errors=True)
    return compare(reference.recording, found, loaded.first.saved, reference.exact)


def verify_against(request: Request, assignment: str, *, steps: int = 5) -> Verdict:
    """Take the same steps on one process with another value of one key, and compare them.

    Another `train.precision` stands for itself: plugins that round below it take no part on that side.

    Raises:
        ForgeError: for a key that is none, or if one of the two can't be run.
    """
    from .compare import compare_settings

    key, equals, value = assignment.partition("=")
    if not equals:
        raise ConfigError(f"--against {assignment!r}: expected key=value, like precision=bf16.")
    key = _full_key(key.strip())
    if key.startswith("parallel."):
        raise ConfigError(f"--against {assignment!r}: compares on one process; layouts are compared with --nproc.")
    setup, rounding = _alone(request), key != "train.precision"
    one, other = _recorded(setup, steps), _recorded(_alone(request, f"{key}={value}"), steps, rounding=rounding)
    return compare_settings(one, other, f"{key}={value}", rounded=not rounding and _rounds(setup))


def _alone(request: Request, *more: str) -> Setup:
    """The same configuration on one process."""
    sizes = [f"parallel.{axis}=1" for axis in AXES]
    return resolve(dataclasses.replace(request, set=(*request.set, *sizes, *more)), world=1)


def _rounds(setup: Setup) -> bool:
    """Whether a plugin rounds below the run's precision."""
    return any(enabled.cls.rounds for enabled in setup.hooks.enabled.values())


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


def failure(code: int, complaint: str) -> ForgeError:
    """What a layout that ended with a code and a complaint raises."""
    error = ConfigError if code == ConfigError.code else ForgeError
    return error(complaint)


__all__ = ["Check", "Offender", "Reference", "Start", "Verdict", "launched", "verify", "verify_against"]

"""`forge verify`: the same few steps on one process and on a parallel layout, or with another setting, compared."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Request
from ..config.sections import CORE_SECTIONS, ParallelSection
from ..errors import ConfigError, ForgeError
from ..launch import Task, launch
from ..setup import Setup, resolve

if TYPE_CHECKING:
    from .record import Recording

AXES = tuple(axis.name for axis in dataclasses.fields(ParallelSection))


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

    @property
    def agree(self) -> bool:
        return all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {
            "agree": self.agree,
            "checks": [
                {"name": c.name, "worst": c.worst, "tolerance": c.tolerance, "ok": c.ok, "where": c.where}
                for c in self.checks
            ],
            "losses": [list(pair) for pair in self.losses],
            "gradients": [dataclasses.asdict(offender) for offender in self.offenders],
            "advice": list(self.advice),
        }


def verify(request: Request, nproc: int, *, steps: int = 5) -> Verdict:
    """Take the same steps on one process and on `nproc`, from the same weights and data, and compare them.

    Raises:
        ForgeError: if one of the two can't be run; its message is the one of the rank that failed first.
    """
    layout = resolve(request, world=nproc)
    alone = _alone(request)
    folder = Path(tempfile.mkdtemp(prefix="forge-verify-"))
    task = Task(
        "forge_train.verification.record:worker",
        {"request": dataclasses.asdict(request), "steps": steps, "folder": str(folder)},
        folder=folder / "launch",
        logs=folder / "log",
        quiet=True,
    )
    ended = launch(task, nproc)
    if ended.signal:
        raise KeyboardInterrupt
    if complaint := ended.complaint():
        raise _failure(ended.code, complaint)  # its folder stays, for the logs
    from .record import Recording

    return finish(folder, Recording.read(folder, layout, nproc), alone, request, steps)


def finish(folder: Path, layout: Recording, alone: Setup, request: Request, steps: int) -> Verdict:
    """Run the reference, compare it with what a layout has left in a folder, and remove that."""
    from .compare import compare, own_gap
    from .record import record

    reference = record(alone, steps, folder / "reference")
    assert reference is not None
    again = record(_alone(request), 0, folder / "loaded", compare_with=folder / "checkpoint")
    assert again is not None
    gap = None
    if reference.precision != "fp32":
        exact = record(_alone(request, "train.precision=fp32"), steps, folder / "exact")
        assert exact is not None
        gap = own_gap(reference, exact)
    shutil.rmtree(folder, ignore_errors=True)
    return compare(reference, layout, again.first.saved, gap)


def verify_against(request: Request, assignment: str, *, steps: int = 5) -> Verdict:
    """Take the same steps on one process with another value of one key, and compare them.

    Raises:
        ForgeError: for a key that is none, or if one of the two can't be run.
    """
    from .compare import compare_settings
    from .record import record

    key, equals, value = assignment.partition("=")
    if not equals:
        raise ConfigError(f"--against {assignment!r}: expected key=value, like precision=bf16.")
    key = _full_key(key.strip())
    if key.startswith("parallel."):
        raise ConfigError(f"--against {assignment!r}: compares on one process; layouts are compared with --nproc.")
    with tempfile.TemporaryDirectory(prefix="forge-verify-") as folder:
        one = record(_alone(request), steps, Path(folder) / "one")
        other = record(_alone(request, f"{key}={value}"), steps, Path(folder) / "other")
    assert one is not None
    assert other is not None
    return compare_settings(one, other, f"{key}={value}")


def _alone(request: Request, *more: str) -> Setup:
    """The same configuration on one process."""
    sizes = [f"parallel.{axis}=1" for axis in AXES]
    return resolve(dataclasses.replace(request, set=(*request.set, *sizes, *more)), world=1)


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


def _failure(code: int, complaint: str) -> ForgeError:
    error = ConfigError if code == ConfigError.code else ForgeError
    return error(complaint)


__all__ = ["Check", "Offender", "Verdict", "finish", "verify", "verify_against"]

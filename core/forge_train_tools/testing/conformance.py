"""The conformance suite: what `forge plugins check NAME` and `assert_conforms` hold a plugin to."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forge_train.base.errors import ForgeError, describe
from forge_train.base.names import PluginRef
from forge_train.plugin.calls import EnabledPlugin
from forge_train.plugin.hookspecs import SPECS
from forge_train.plugin.plugin import Plugin
from forge_train.registry.discovery import load
from forge_train_kit.plugins import find

from .environment import installed

if TYPE_CHECKING:
    from .pool import Pool
    from .runs import Settings
    from .verifying import Verifier

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    status: Status
    detail: str = ""


@dataclass
class Report:
    """Results of a plugin's checks, in the order they ran."""

    ref: PluginRef
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not any(check.status == "fail" for check in self.checks)

    def of(self, status: Status) -> list[Check]:
        return [check for check in self.checks if check.status == status]

    def plain(self) -> dict[str, Any]:
        """As JSON, for `forge plugins check --json`."""
        return {
            "name": self.ref.name,
            "distribution": self.ref.distribution,
            "version": self.ref.version,
            "object": self.ref.object,
            "passed": self.passed,
            "checks": [{"name": c.name, "status": c.status, "detail": c.detail} for c in self.checks],
        }

    def __str__(self) -> str:
        lines = [f"{c.status:4}  {c.name}" + (f": {c.detail}" if c.detail else "") for c in self.checks]
        return "\n".join([f"plugin {self.ref.label}", *lines])


class BrokenError(Exception):
    """A check that fails, and why."""


class DoubtError(Exception):
    """A check that passes with a warning."""


class SkippedError(Exception):
    """A check that can't be made here, and why."""


def require(condition: object, message: str) -> None:
    """Fail the check unless a condition holds."""
    if not condition:
        raise BrokenError(message)


Trial = Callable[[], str | None]
"""A check: gives a detail or nothing, or raises `BrokenError`, `DoubtError` or `SkippedError`."""


def attempt(name: str, trial: Trial) -> Check:
    """Make one check."""
    try:
        return Check(name, "ok", trial() or "")
    except DoubtError as doubt:
        return Check(name, "warn", str(doubt))
    except SkippedError as skipped:
        return Check(name, "skip", str(skipped))
    except BrokenError as broken:
        return Check(name, "fail", str(broken))
    except ForgeError as error:
        return Check(name, "fail", str(error))
    except (Exception, SystemExit) as error:  # whatever a stranger's code does
        return Check(name, "fail", _located(error))


def assert_conforms(
    plugin: str | type[Plugin],
    config: Settings | None = None,
    *,
    strict: bool = False,
    folder: Path | None = None,
    ranks: Pool | None = None,
) -> Report:
    """Hold a plugin to the contract, as `forge plugins check` does.

    Args:
        plugin: the name of an installed plugin, `package.module:Class`, or a class.
        config: what its section must say, where it does not train without: `{"mine": {"path": …}}`.
        strict: whether warnings fail too.
        folder: where its tiny trainings leave their runs.
        ranks: processes for a plugin with transforms, which is verified on two; by default they are started for it.

    Raises:
        AssertionError: with every check that failed.
        ConfigError: if there is no such plugin.
    """
    report = check(plugin, config, folder=folder, ranks=ranks)
    wrong = report.of("fail") + (report.of("warn") if strict else [])
    if wrong:
        lines = "\n".join(f"  {check.name}: {check.detail}" for check in wrong)
        raise AssertionError(f"Plugin {report.ref.label} does not conform:\n{lines}")
    return report


def check(
    plugin: str | type[Plugin],
    config: Settings | None = None,
    *,
    sets: Iterable[str] = (),
    folder: Path | None = None,
    ranks: Pool | None = None,
) -> Report:
    """Make every check that applies to a plugin.

    Args:
        plugin: as for `assert_conforms`.
        config: as for `assert_conforms`.
        sets: as `--set`, laid over `config`.
        folder: as for `assert_conforms`.
        ranks: as for `assert_conforms`.

    Raises:
        ConfigError: if there is no such plugin.
    """
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(installed())
        name = plugin if isinstance(plugin, str) else fake.add(plugin)
        home = _fresh(folder) or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forge-check-")))
        report = Report(find(name))

        def verifier() -> Verifier:
            from .pool import Pool
            from .verifying import Verifier

            return Verifier(ranks or stack.enter_context(Pool(home)))

        report.checks += _checks(report.ref, name, config, tuple(sets), home, verifier)
        return report


def _fresh(folder: Path | None) -> Path | None:
    """A folder of its own for every check: it would continue with the runs of another one."""
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="check-", dir=folder))


def _checks(
    found: PluginRef,
    spec: str,
    config: Settings | None,
    sets: tuple[str, ...],
    folder: Path,
    verifier: Callable[[], Verifier],
) -> Iterator[Check]:
    """Every check, from what needs the least to what needs a training; what can't follow a failure is left out."""
    from . import contract

    done = attempt("imports", lambda: contract.imports(found))
    yield done
    if done.status == "fail":
        return
    yield attempt("imports nothing slow", lambda: contract.imports_lazily(found))
    enabled = EnabledPlugin(found, load(found), specs=SPECS)
    failed = False
    for name, trial in contract.trials(enabled):
        done = attempt(name, trial)
        failed |= done.status == "fail"
        yield done
    done = attempt("has what it needs", lambda: contract.needs(enabled))
    yield done
    if failed or done.status == "skip":
        return
    from .practice import practise

    yield from practise(enabled, spec, config, sets, folder, verifier)


def _located(error: BaseException) -> str:
    """An exception in one line, with the place in somebody's code that it came from."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{describe(error)}{where}"

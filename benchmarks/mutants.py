"""Draws single-line mutants of the code, runs the tests that matter for each, and reports those that survive.

    python benchmarks/mutants.py                                  # 60 of seed 7; writes benchmarks/results/mutants.md
    python benchmarks/mutants.py --count 20 --only '*/_tp/*'      # some files, without writing
    python benchmarks/mutants.py --mutant c1fb4e76                # one, with what its tests print
    python benchmarks/mutants.py --log judged.jsonl               # goes on where it was cut, judges survivors again

Every mutant lies in a copy of the repository that comes first on `sys.path`: processes that its tests start, ranks
included, import it too. benchmarks/mutants.toml says which tests belong to which files, and which mutants are
equivalent to the code. cosmic-ray (8.7) has one test command for all files and drops no statement; mutmut (3.8) mutates
no decorated function, and so no hook, and chooses tests by what they call in their own process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "mutants.md"
sys.path.insert(0, str(HERE))

from mutants_page import page, share  # noqa: E402
from mutating import Mutant, draw, mutants  # noqa: E402

LEFT_OUT, LEFT_OUT_ABOVE = {"__pycache__"}, {"runs", "site", "dist", "build"}
"""What no copy needs, anywhere, and at the root."""


@dataclass(frozen=True)
class Area:
    """Files, and the tests that matter for them."""

    name: str
    files: tuple[str, ...]
    """Patterns."""
    tests: tuple[str, ...]
    """What pytest is given, one run after the other, quick ones first."""


@dataclass(frozen=True)
class Plan:
    """What benchmarks/mutants.toml says."""

    areas: tuple[Area, ...]
    unread: frozenset[str]
    equivalent: dict[tuple[str, str, str], str]
    """File, line before and after → why."""

    @classmethod
    def read(cls, file: Path) -> Plan:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        areas = tuple(Area(one["name"], tuple(one["files"]), tuple(one["tests"])) for one in data["area"])
        equivalent = {(one["file"], one["was"], one["now"]): one["why"] for one in data.get("equivalent", ())}
        return cls(areas, frozenset(data.get("unread", ())), equivalent)

    def mutants(self, root: Path) -> dict[Mutant, Area]:
        """All there are. A file belongs to the first area that has it."""
        found: dict[str, Area] = {}
        for area in self.areas:
            for pattern in area.files:
                for path in sorted(root.glob(pattern)):
                    found.setdefault(path.relative_to(root).as_posix(), area)
        return {mutant: area for file, area in found.items() for mutant in mutants(root, file, self.unread)}

    def reason(self, mutant: Mutant) -> str:
        """Why a mutant is equivalent; empty if it is not."""
        return self.equivalent.get((mutant.file, mutant.was, mutant.now), "")


@dataclass(frozen=True)
class Judged:
    """What became of a mutant."""

    mutant: Mutant
    area: Area
    outcome: str
    """One of OUTCOMES."""
    by: str = ""
    """The test that failed, or why it is equivalent."""
    seconds: float = 0.0

    def line(self) -> str:
        """For `--log`."""
        return json.dumps({"key": self.mutant.key, "outcome": self.outcome, "by": self.by, "seconds": self.seconds})

    def __str__(self) -> str:
        by = f" by {self.by}" if self.outcome == "killed" else ""
        return f"{self.outcome}{by}, {self.seconds:.0f} s\n    {self.mutant}"


class Judge:
    """Runs tests on copies of a repository."""

    def __init__(self, root: Path, plan: Plan, limit: float) -> None:
        self.root, self.plan, self.limit = root, plan, limit
        self._running: set[int] = set()

    def judge(self, mutant: Mutant, area: Area, *, aloud: bool = False) -> Judged:
        if why := self.plan.reason(mutant):
            return Judged(mutant, area, "equivalent", why)
        began = time.monotonic()
        with copied(self.root) as copy:
            mutant.apply(copy)
            for tests in area.tests:
                code, said = self._pytest(copy, "-x", *shlex.split(tests))
                if aloud:
                    print(said)
                if code != 0:
                    break
        outcome = {None: "timed out", 0: "survived"}.get(code, "killed")
        failed = _failed(said) or [tests] if outcome == "killed" else [""]
        return Judged(mutant, area, outcome, failed[0], time.monotonic() - began)

    def unfit(self, judged: Sequence[Judged]) -> list[str]:
        """Which of the tests that killed a mutant fail without one too."""
        killers = dict.fromkeys(one.by for one in judged if one.outcome == "killed")
        tests = [by for by in killers if "::" in by]
        files = [word for by in killers if "::" not in by for word in shlex.split(by) if "/" in word]
        found: list[str] = []
        with copied(self.root) as copy:
            for arguments in (tests, ["--collect-only", *files] if files else []):
                code, said = self._pytest(copy, *arguments) if arguments else (0, "")
                found += (_failed(said) or arguments) if code else []
        return found

    def stop(self) -> None:
        """End what is running."""
        for group in tuple(self._running):
            os.killpg(group, signal.SIGKILL)

    def _pytest(self, copy: Path, *arguments: str) -> tuple[int | None, str]:
        """The exit code, None for a run that did not end in time, and what it printed."""
        packages = [str(copy / name) for name in ("core", "plugins", "cli", "contrib")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(packages),
            "PYTHONDONTWRITEBYTECODE": "1",  # two mutants may have one size and one time
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", *arguments],
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._running.add(process.pid)
        try:
            said, _ = process.communicate(timeout=self.limit)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
        finally:
            self._running.discard(process.pid)


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of a repository."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        unwanted = LEFT_OUT | (LEFT_OUT_ABOVE if Path(folder) == root else set())
        return [name for name in names if name in unwanted or name.startswith(".")]

    with tempfile.TemporaryDirectory(prefix="forge-mutant-") as folder:
        yield Path(shutil.copytree(root, Path(folder) / root.name, ignore=left_out))


def _failed(said: str) -> list[str]:
    """The tests that pytest's summary names."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+\.py.*?)(?: - .*)?$", said, re.MULTILINE)


def killed_before(log: Path | None, drawn: dict[Mutant, Area]) -> dict[Mutant, Judged]:
    """Of these, those that an earlier run with the same log killed. A key changes with its line and file."""
    if log is None or not log.exists():
        return {}
    lines = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    killed = {line["key"]: line for line in lines if line["outcome"] in ("killed", "timed out")}
    return {
        mutant: Judged(mutant, area, line["outcome"], line["by"], line["seconds"])
        for mutant, area in drawn.items()
        if (line := killed.get(mutant.key))
    }


def asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7, help="which are drawn (7)")
    parser.add_argument("--count", type=int, default=60, help="how many (60)")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="files to draw from, such as '*/_tp/*'")
    parser.add_argument("--mutant", metavar="KEY", help="this one alone, with what its tests print")
    parser.add_argument("--list", action="store_true", help="print those drawn, and run nothing")
    parser.add_argument("--log", type=Path, metavar="FILE", help="what was judged; what it killed is not judged again")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (1)")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for one run of pytest (1800)")
    parser.add_argument("--bar", type=float, default=90.0, help="percent that have to be killed (90)")
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the repository")
    parser.add_argument("--plan", type=Path, default=HERE / "mutants.toml", help="tests and equivalent mutants")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = asked(arguments)
    with copied(options.root.resolve()) as root:  # the original may change in the meantime
        return run(options, root)


def run(options: argparse.Namespace, root: Path) -> int:
    """What `main` does, on a repository that stays as it is."""
    began = time.monotonic()
    judge = Judge(root, Plan.read(options.plan), options.limit)
    known = judge.plan.mutants(root)
    here = {mutant: area for mutant, area in known.items() if fnmatch(mutant.file, options.only)}
    for gone in judge.plan.equivalent.keys() - {(one.file, one.was, one.now) for one in known}:
        print(f"{options.plan.name}: this code has no such mutant any more: {' | '.join(gone)}")
    drawn = draw([*here], options.count, options.seed)
    if options.mutant:
        drawn = [mutant for mutant in known if mutant.key.startswith(options.mutant)]
    if not drawn:
        print("No such mutant." if options.mutant else f"Nothing to mutate in {options.only}.", file=sys.stderr)
        return 2
    if options.list:
        print(*drawn, sep="\n")
        return 0
    before = killed_before(options.log, {mutant: known[mutant] for mutant in drawn})
    judged, todo = [*before.values()], [mutant for mutant in drawn if mutant not in before]
    written = options.only == "*" and not options.mutant and options.root == HERE.parent
    one_by_one = partial(judge.judge, aloud=bool(options.mutant))

    def say() -> str:
        return page(judged, len(before), len(here), options.seed, options.bar, time.monotonic() - began)

    with ThreadPoolExecutor(options.jobs) as pool, (options.log or Path(os.devnull)).open("a", encoding="utf-8") as log:
        try:
            for one in pool.map(one_by_one, todo, [known[mutant] for mutant in todo]):
                judged.append(one)
                print(f"{len(judged):3}/{len(drawn)}  {one}", flush=True)
                print(one.line(), file=log, flush=True)
                if written:
                    RESULTS.write_text(say(), encoding="utf-8")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            judge.stop()
    print(say())
    if unfit := judge.unfit(judged):
        print(f"These tests fail without a mutant too, so that what they killed says nothing: {', '.join(unfit)}")
        return 2
    return 0 if share(judged) >= options.bar else 1


if __name__ == "__main__":
    raise SystemExit(main())

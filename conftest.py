"""`pytest --accept ISSUE`: runs the tests of an issue's points and prints what stands.

This file lies in the root because an issue may bear a folder's name: only here does pytest know the option before it
takes `core` in `--accept core` for a path.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

POINTS = Path(__file__).parent / "tests" / "acceptance.toml"


class Acceptance:
    """Collects the outcome of every test marked `accept(issue, point)`, and prints what stands."""

    def __init__(self, issue: str | None) -> None:
        self.issue = issue
        self.points: dict[str, dict[str, str]] = tomllib.loads(POINTS.read_text(encoding="utf-8"))
        self.marked: dict[str, set[tuple[str, str]]] = {}
        self.outcomes: dict[tuple[str, str], list[str]] = defaultdict(list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            claims = {self.claim(marker) for marker in item.iter_markers("accept")}
            if claims:
                self.marked[item.nodeid] = claims
        if self.issue is None:
            return
        chosen = {node for node, claims in self.marked.items() if any(issue == self.issue for issue, _ in claims)}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]

    def claim(self, marker: pytest.Mark) -> tuple[str, str]:
        issue, point = (str(argument) for argument in marker.args)
        self.points.setdefault(issue, {}).setdefault(point, f"(not in {POINTS.name})")
        return issue, point

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            for claim in self.marked.get(report.nodeid, ()):
                self.outcomes[claim].append(report.outcome)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        wide = max((len(f"{issue} {point}") for issue, points in self.points.items() for point in points), default=0)
        for issue, points in self.points.items():
            if self.issue not in (None, issue):
                continue
            terminalreporter.section(f"what stands of {issue!r}")
            for point, text in points.items():
                stand = self.stand((issue, point))
                colour = {"passed": "green", "failed": "red"}.get(stand, "yellow")
                terminalreporter.write(f"{issue} {point}".ljust(wide + 2))
                terminalreporter.write(stand.ljust(9), **{colour: True})
                terminalreporter.write_line(text)

    def stand(self, claim: tuple[str, str]) -> str:
        """`passed` if all tests of the point did, `failed` if one did not, `skipped`, or `none` without a test."""
        outcomes = self.outcomes.get(claim, [])
        return next((known for known in ("failed", "skipped", "passed") if known in outcomes), "none")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", metavar="ISSUE", help="run the tests of an issue's points, and say what stands")


def pytest_configure(config: pytest.Config) -> None:
    issue = config.getoption("--accept")
    if issue is not None or "accept" in config.getoption("markexpr").split():
        config.pluginmanager.register(acceptance := Acceptance(issue))
        if issue is not None and issue not in acceptance.points:
            raise pytest.UsageError(f"--accept {issue}: {POINTS.name} knows {', '.join(acceptance.points)}.")

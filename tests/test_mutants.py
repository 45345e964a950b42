"""`make mutants`: a planted mutant is killed, one that no test sees is reported, and its plan fits this repository."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import mutants  # noqa: E402
import mutating  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CODE = '''\
"""Some sizes."""

LARGEST = 10


def fits(size: int | None = None) -> bool:
    """Whether 1 + 1 is small."""
    if size is None:
        raise ValueError(f"a size of {1 + 1}")
    return size <= LARGEST


def difference(one: int, other: int) -> int:
    return one - other
'''
UNTESTED = """\
def total(one: int, other: int) -> int:
    return one + other
"""
TESTS = """\
import subprocess, sys
import sizes

def test_fits():
    assert sizes.fits(10) and not sizes.fits(11)

def test_in_another_process():
    command = [sys.executable, "-c", "import sizes; print(sizes.difference(3, 1))"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "2\\n"
"""
PLAN = """\
[[area]]
name = "sizes"
files = ["core/*.py"]
tests = ["tests/dist/test_sizes.py -k fits", "tests/dist"]
"""
SAME = """
[[equivalent]]
file = "core/total.py"
was = "return one + other"
now = "return one - other"
why = "the other is always 0"
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A repository of two modules."""
    texts = {"core/sizes.py": CODE, "core/total.py": UNTESTED, "tests/dist/test_sizes.py": TESTS, "plan.toml": PLAN}

    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(folder: Path, *arguments: str) -> int:
    return mutants.main(["--root", str(folder), "--plan", str(folder / "plan.toml"), *arguments])


def test_what_only_people_read_is_left_alone(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--list", "--only", "*/sizes.py") == 0
    found = re.findall(r"- (.*)\n    \+ (.*)", capsys.readouterr().out)
    assert sorted(found) == [
        ("if size is None:", "if False:"),
        ("if size is None:", "if True:"),
        ("if size is None:", "if size is not None:"),
        ("return one - other", "return one + other"),
        ("return size <= LARGEST", "return not (size <= LARGEST)"),
        ("return size <= LARGEST", "return size < LARGEST"),
        ("return size <= LARGEST", "return size > LARGEST"),
    ]


def test_planted_mutants_are_killed_and_survivors_reported(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--only", "*/sizes.py", "--count", "4", "--bar", "75") == 0
    said = capsys.readouterr().out
    outcomes = re.findall(r"^ *\d+/4  (\w+)(?: by (\S+))?,.*\n.*\n.*\n    \+ (.*)$", said, re.MULTILINE)
    fits, process = "tests/dist/test_sizes.py::test_fits", "tests/dist/test_sizes.py::test_in_another_process"
    assert sorted(outcomes) == [
        ("killed", fits, "if size is not None:"),
        ("killed", fits, "return size < LARGEST"),
        ("killed", process, "return one + other"),
        ("survived", "", "if False:"),
    ]
    assert "```diff\n- if size is None:\n+ if False:\n```" in said
    assert "| **all** | 4 | 3 | 0 | 1 | 0 | 75 % |" in said
    assert (tiny / "core/sizes.py").read_text(encoding="utf-8") == CODE, "only copies are changed"


@pytest.mark.extended
def test_what_a_log_killed_is_not_judged_again(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--only", "*/sizes.py", "--count", "4", "--bar", "75", "--log", str(tiny / "judged.jsonl"))
    run(tiny, *asked)
    assert "None of them were killed in an earlier run" in capsys.readouterr().out
    run(tiny, *asked)
    said = capsys.readouterr().out
    assert re.findall(r"^ *\d/4  (\w+),.*\n.*\n.*\n    \+ (.*)$", said, re.MULTILINE) == [("survived", "if False:")]
    assert "3 of them were killed in an earlier run" in said
    assert "| **all** | 4 | 3 | 0 | 1 | 0 | 75 % |" in said
    (tiny / "core/sizes.py").write_text(CODE.replace("one - other", "other - one"), encoding="utf-8")
    run(tiny, *asked)
    assert "2 of them were killed in an earlier run" in capsys.readouterr().out


def test_too_many_survivors_fail_and_equivalent_mutants_do_not_count(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny, "--only", "*/total.py") == 1
    assert "| **all** | 1 | 0 | 0 | 1 | 0 | 0 % |" in capsys.readouterr().out
    (tiny / "plan.toml").write_text(PLAN + SAME, encoding="utf-8")
    run(tiny, "--only", "*/total.py")
    said = capsys.readouterr().out
    assert "| **all** | 1 | 0 | 0 | 0 | 1 |" in said
    assert "the other is always 0" in said
    (tiny / "core/total.py").write_text("", encoding="utf-8")
    run(tiny, "--list")
    assert "no such mutant any more: core/total.py | return one + other | return one - other" in capsys.readouterr().out


def test_a_test_that_fails_anyway_kills_nothing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tiny / "tests/dist/test_sizes.py").write_text(TESTS.replace("(10)", "(12)"), encoding="utf-8")
    assert run(tiny, "--only", "*/sizes.py", "--count", "1") == 2
    assert "fail without a mutant too" in capsys.readouterr().out


def test_a_mutant_that_does_not_end_is_killed(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--only", "*/sizes.py", "--count", "1", "--limit", "0.05") == 0
    assert "| **all** | 1 | 0 | 1 | 0 | 0 | 100 % |" in capsys.readouterr().out


def test_which_are_drawn_depends_on_their_text_alone(tiny: Path) -> None:
    before = mutating.mutants(tiny, "core/sizes.py")
    (tiny / "core/sizes.py").write_text(CODE.replace("LARGEST = 10", "# of all\nLARGEST = 10"), encoding="utf-8")
    after = mutating.mutants(tiny, "core/sizes.py")
    assert [one.start for one in before] != [one.start for one in after]
    for seed in range(3):
        first, second = ([one.key for one in mutating.draw(found, 3, seed)] for found in (before, after))
        assert first == second
    assert mutating.draw(before, 3, 0) != mutating.draw(before, 3, 1)


def test_the_plan_names_files_and_tests_that_are_there() -> None:
    plan = mutants.Plan.read(ROOT / "benchmarks" / "mutants.toml")
    for area in plan.areas:
        for pattern in area.files:
            assert [*ROOT.glob(pattern)], pattern
        for word in (word for tests in area.tests for word in shlex.split(tests) if word.startswith("tests/")):
            assert (ROOT / word).is_file(), word
    for (file, _, _), why in plan.equivalent.items():
        assert (ROOT / file).is_file(), file
        assert why.endswith("."), why

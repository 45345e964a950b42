"""`make gpu` at toy size: every case that a CPU can run gives good numbers, and the suite tells what went wrong.

CI takes cases in which each kernel, precision, model and option occurs; `make test-all` takes them all.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crossed import marked

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from gpu import __main__, cases, machine, page, suite  # noqa: E402
from gpu.case import Case, LacksError, Row, Size  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

TOY = Size("cpu", toy=True)
ABOUT = {"memory_gib": 80}
HERE = {case.name: case for case in cases.cases(ABOUT) if not case.gpus}
EXTENDED = (
    *("attention-eager-bf16", "attention-eager-fp16", "attention-flex-fp32", "attention-flex-fp16"),
    *("attention-varlen-fp32", "attention-varlen-bf16", "attention-sdpa-auto-fp32", "attention-sdpa-auto-fp16"),
    *("attention-sdpa-flash-fp32", "attention-sdpa-flash-bf16", "attention-sdpa-math-bf16", "attention-sdpa-math-fp16"),
    *("verify-bf16", "verify-fp32", "verify-lora", "compile-sdpa", "compile-flex-ac", "compile-varlen"),
    *("ask-generate-memory", "ask-capture-moe", "ask-capture-mla", "ask-capture-delta_net", "ask-grpo"),
    *("speed-1b-fp8", "speed-8b-8-layers-bf16", "speed-moe-bf16", "speed-8b-8-layers-fp8"),
    *("verify-moe", "compile-varlen-ac", "attention-sdpa-flash-fp16", "resume-bf16", "waits-varlen"),
)


@pytest.mark.parametrize("name", marked(HERE, EXTENDED))
def test_every_case_without_a_device_gives_good_numbers(name: str) -> None:
    case = HERE[name]
    module, _, name = case.function.partition(":")
    try:
        rows = getattr(importlib.import_module(f"gpu.{module}"), name)(TOY, **case.arguments)
    except LacksError as error:
        pytest.skip(str(error))
    assert rows
    assert [row for row in rows if not row.ok] == []


def test_the_table_of_cases() -> None:
    """Kernels, products, runs, answers, eight devices and speeds are all there, each name once; 8B whole on an H200."""
    found = cases.cases(ABOUT)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert {case.gpus for case in found} == {0, 1, 2, 4, 8}
    assert "speed-8b-8-layers-fp8" in names
    assert "speed-8b-fp8" in {case.name for case in cases.cases({"memory_gib": 140})}
    for case in found:
        module, _, name = case.function.partition(":")
        assert callable(getattr(importlib.import_module(f"gpu.{module}"), name))


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A folder of cases that `gpu.one` finds: it imports modules of the package `gpu` only."""
    own = tmp_path / "gpu"
    own.mkdir()
    for file in (BENCHMARKS / "gpu").glob("*.py"):
        (own / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def run(ours: Path, code: str, cases_of: list[Case], **values: Any) -> list[suite.Result]:
    (ours / "gpu" / "own.py").write_text(f"import time\nfrom .case import LacksError, Row\n{code}\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ours)}
    found = suite.Suite(TOY, 0, ours / "kept", {"stamp": 1}, environment, **values)
    return list(found.run(cases_of))


CODE = """
def good(size): return [Row("one", "1", "≤ 2")]
def bad(size): return [Row("one", "3", "≤ 2", ok=False)]
def empty(size): return []
def lacks(size): raise LacksError("flash-attn is not installed")
def broken(size): raise ValueError("boom")
def slow(size): print("before", flush=True); time.sleep(60)
"""


def test_what_a_case_can_come_to(ours: Path) -> None:
    wanted = {
        "good": "ok",
        "bad": "wrong",
        "empty": "failed",
        "lacks": "lacks a package",
        "broken": "failed",
        "slow": "deadline",
        "device": "needs a device",
    }
    several = [
        Case(name, f"own:{name}", gpus=int(name == "device"), seconds=3 if name == "slow" else 30) for name in wanted
    ]
    results = run(ours, CODE, several, beside=2)
    assert {one.name: one.status for one in results} == wanted
    told = {one.name: one.told for one in results}
    assert "boom" in told["broken"]
    assert "before" in told["slow"]
    assert told["device"] == "needs a CUDA device; there are 0"
    assert suite.failed(results)
    assert not suite.failed([one for one in results if one.name in ("good", "lacks", "device")])
    table = page.markdown(several, results, {"device": "cpu", "torch": "2", "python": "3", "cores": 2}, toy=True)
    assert "| bad | one | 3 | ≤ 2 | **no** |" in table
    assert "| device | needs a CUDA device; there are 0 | needs a device | — | — |" in table
    assert "boom" in table


def test_many_numbers_are_one_row_and_a_failure_tells_its_exception() -> None:
    numbers = tuple(Row(f"{size} tokens", f"{size}.0e-03", "≤ 2.0e-02") for size in range(1, 8))
    folded = suite.Result("many", "ok", 1.0, numbers)
    wrong = suite.Result("some", "wrong", 1.0, (*numbers, Row("last", "3.0e-02", "≤ 2.0e-02", ok=False)))
    about = {"device": "cpu", "torch": "2", "python": "3", "cores": 2}
    speed = suite.Result("speed", "ok", 1.0, (Row("tokens", "1"),))
    several = [Case("many", ""), Case("some", ""), Case("speed", "", judges="speed")]
    table = page.markdown(several, [folded, wrong, speed], about, toy=False)
    assert "| many | 7 numbers; nearest to its bar: 7 tokens | 7.0e-03 | ≤ 2.0e-02 | yes |" in table
    assert table.count("| some |") == 8
    assert table.index("| speed |") < table.index("| many |")
    told = suite._tail("\n".join(["torch.Error: why: 1", *(f"line {number}" for number in range(30))]), "exit code 1")
    assert told.splitlines()[:2] == ["exit code 1", "torch.Error: why: 1"]


def test_a_rerun_goes_on(ours: Path) -> None:
    """Good and bad numbers are kept; what failed is tried again; other code or another machine starts anew."""
    code = """
from pathlib import Path
def count(size):
    file = Path(__file__).with_suffix(".n")
    tries = len(file.read_text()) if file.exists() else 0
    file.write_text("x" * (tries + 1))
    return [Row("times", str(tries + 1))] if tries else []
"""
    case = [Case("count", "own:count")]
    assert run(ours, code, case)[0].status == "failed"
    assert run(ours, code, case)[0].rows == (Row("times", "2"),)
    assert run(ours, code, case)[0].rows == (Row("times", "2"),)
    (ours / "kept" / "count.json").write_text('{"stamp": 2, "status": "ok"}')
    assert run(ours, code, case)[0].rows == (Row("times", "3"),)
    assert run(ours, code, [Case("late", "own:count")], minutes=0)[0].status == "not reached"


def test_the_command_without_pip(tmp_path: Path) -> None:
    """From a checkout on PYTHONPATH alone, plugins are found by what pyproject.toml says; the table is written."""
    site = tmp_path / "site"
    site.mkdir()
    for folder in {path for path in sys.path if path.endswith("site-packages")}:
        for one in Path(folder).iterdir():
            if (
                not one.name.lower().startswith(("forge_train", "_editable_impl_forge", "__editable__"))
                and one.suffix != ".pth"
            ):
                (site / one.name).symlink_to(one)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, (machine.ROOT / one for one in machine.FOLDERS)), str(site)]),
    }
    command = [sys.executable, "-S", str(BENCHMARKS / "gpu"), "--toy", "--device", "cpu", "--kept", str(tmp_path / "k")]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out"), "waits-dense", "one-rank"],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert {one["name"]: one["status"] for one in found["cases"]} == {
        "waits-dense": "ok",
        "one-rank": "ok",
        "one-rank-offload": "needs a device",
    }
    assert "steps without a wait" in (tmp_path / "out" / "gpu.md").read_text()
    before = [(file, file.stat().st_mtime_ns) for file in machine.ROOT.glob("benchmarks/results/gpu.*")]
    assert __main__.main([*command[3:], "waits-dense"]) == 0
    assert (tmp_path / "k" / "toy" / "gpu.md").is_file()
    assert [(file, file.stat().st_mtime_ns) for file in machine.ROOT.glob("benchmarks/results/gpu.*")] == before
    unknown = subprocess.run([*command, "nope"], check=False, capture_output=True, text=True, env=environment)
    assert unknown.returncode == 2
    assert "No case begins with 'nope'" in unknown.stderr


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "_project", lambda: {"dependencies": ["torch>=2.11", "no-such-package>=3", "torchao"]})
    assert __main__.main([]) == 2
    assert "lacks: no-such-package>=3. Install that" in capsys.readouterr().err

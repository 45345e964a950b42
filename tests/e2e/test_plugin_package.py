"""A package of plugins that is not forge's, beside forge's wheel, in an environment where nothing is editable."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plugin-package"
PLUGINS = ["frozen_norms", "signum", "spike_guard", "stopwatch"]

CONFIG = """\
plugins = ["frozen-norms", "signum", "spike-guard", "stopwatch"]

[run]
device = "cpu"

[train]
steps = {steps}
global_batch = 4
micro_batch = 2
sequence = 32

[checkpoint]
every = 10

[log]
every = 1

[decoder]
dim = 32
layers = 2
heads = 2

[text]
path = "{text}"

[signum]
lr = 3e-4

[frozen_norms]
names = ["*norm*"]

[spike_guard]
factor = 1.05
"""

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


class Environment:
    """A virtual environment with what forge needs, and forge itself from a wheel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.variables = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        } | {"OMP_NUM_THREADS": "1"}

    def start(self, *arguments: object, cwd: Path, **options: Any) -> subprocess.Popen[str]:
        command = [str(self.folder / "bin" / "forge"), *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=cwd, env=self.variables, text=True, **(pipes | options))

    def forge(self, *arguments: object, cwd: Path, code: int = 0) -> str:
        """What a command prints, once it has ended as it should."""
        process = self.start(*arguments, cwd=cwd)
        out, err = process.communicate(timeout=600)
        assert process.returncode == code, f"{arguments} ended with {process.returncode}\n{out}\n{err}"
        return out


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Forge's wheel and the example's, in an environment of their own; what is heavy is linked from this one."""
    folder = tmp_path_factory.mktemp("package")
    wheels = folder / "wheels"
    for project in (ROOT, EXAMPLE):
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
        subprocess.run(build, cwd=project, check=True, capture_output=True)
    home = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    heavy = folder / "heavy"
    heavy.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().replace("-", "_").startswith(("forge_train", "_forge_train", "__editable__")):
            (heavy / entry.name).symlink_to(entry)
    (site,) = home.glob("lib/python3*/site-packages")
    (site / "heavy.pth").write_text(f"{heavy}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(home), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, *map(str, wheels.glob("*.whl"))], check=True)
    return Environment(home)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a small text and a configuration, far from forge's sources."""
    text = tmp_path / "text"
    shutil.copytree(ROOT / "docs" / "hooks", text)
    (tmp_path / "run.toml").write_text(CONFIG.format(steps=100, text=text))
    return tmp_path


def numbers(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run without those that differ from run to run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timings = {"tokens_per_second", "step_seconds", "mfu", "memory_gib", "data_wait", "timing"}
    return [{k: v for k, v in line.items() if k not in timings | set(line["timing"])} for line in lines]


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert process.poll() is None, f"it ended with {process.returncode} too soon"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_forge_comes_from_the_wheel(fresh: Environment, work: Path) -> None:
    code = "import forge_train, forge_train_cli; print(forge_train.__file__)"
    where = subprocess.check_output([fresh.python, "-c", code], cwd=work, env=fresh.variables, text=True)
    assert Path(where).is_relative_to(fresh.folder)


def test_it_is_listed_and_its_command_is_there(fresh: Environment, work: Path) -> None:
    found = {one["name"]: one for one in json.loads(fresh.forge("plugins", "list", "--json", cwd=work))}
    assert {name: found[name]["distribution"] for name in PLUGINS} == dict.fromkeys(PLUGINS, "forge-train-example")
    assert (
        found["signum"]["summary"] == "Steps along the sign of the momentum (Bernstein et al. 2018, arXiv:1802.04434)."
    )
    assert "sparkline" in fresh.forge("--help", cwd=work)
    assert "Draw a metric of RUN" in fresh.forge("sparkline", "--help", cwd=work)


@pytest.mark.extended
def test_it_passes_the_check_and_its_own_tests(fresh: Environment, work: Path) -> None:
    report = json.loads(fresh.forge("plugins", "check", "spike-guard", "--json", cwd=work))
    assert [(one["name"], one["passed"]) for one in report["plugins"]] == [("spike_guard", True)]
    shutil.copytree(EXAMPLE / "tests", work / "tests")  # which hold all four to the contract
    pytest_ = [str(fresh.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(pytest_, cwd=work, env=fresh.variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.extended
def test_it_trains_and_goes_on_after_a_kill_like_a_built_in(fresh: Environment, work: Path) -> None:
    def train(name: str) -> Iterator[object]:
        yield from ("train", "run.toml", "--name", name, "--quiet")

    fresh.forge(*train("whole"), cwd=work)
    whole = work / "runs" / "whole"
    assert [line["step"] for line in numbers(whole)] == list(range(1, 101))
    assert numbers(whole)[-1]["spike_guard.skipped"] > 0
    assert {entry["slot"]: entry["plugin"] for entry in json.loads((whole / "composition.json").read_text())} == {
        "frozen_norms": "frozen_norms"
    }
    listed = {one["name"]: one["distribution"] for one in json.loads((whole / "plugins.json").read_text())}
    assert listed["signum"] == "forge-train-example"
    assert "adamw" not in listed

    killed = work / "runs" / "killed"
    process = fresh.start(*train("killed"), cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for((killed / "checkpoints" / "step-00000010").exists, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process = fresh.start(*train("killed"), cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for((killed / "checkpoints" / "step-00000030").exists, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    fresh.forge(*train("killed"), cwd=work)
    assert numbers(killed) == numbers(whole)

    drawn = fresh.forge("sparkline", whole, cwd=work)
    assert drawn.startswith(f"loss {numbers(whole)[0]['loss']:.4g} ")


def test_its_mistakes_are_the_users(fresh: Environment, work: Path) -> None:
    process = fresh.start("train", "run.toml", "-s", "frozen_norms.names=nothing_like_it", "--quiet", cwd=work)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 2
    assert "matched nothing" in said
    assert "forge-train-example" in said

"""The kernel trains without everything that is built on it."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import socket
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from forge_train import ConfigError
from forge_train.config.tree import Tree
from forge_train.engine import train
from forge_train.registry.setup import make_setup

ROOT = Path(__file__).parents[2]
OTHERS = ("forge_train_kit", "forge_train_tools", "forge_train_plugins", "forge_train_cli", "forge_train_contrib")
LONGEST = 10
"""Lines of the script, without blank lines and its docstring."""

DRIVER = """
import importlib.util, pkgutil, runpy, sys
sys.path[:0] = [sys.argv[1], *sys.argv[4:]]
assert not [name for name in sys.argv[3].split() if importlib.util.find_spec(name)], "more than the kernel is there"
import forge_train
for module in pkgutil.walk_packages(forge_train.__path__, "forge_train."):
    importlib.import_module(module.name)
runpy.run_path(sys.argv[2], run_name="__main__")
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree in which only the kernel is left."""
    root = tmp_path_factory.mktemp("kernel")
    shutil.copytree(ROOT / "core/forge_train", root / "forge_train", ignore=shutil.ignore_patterns("__pycache__"))
    return root


RESUMES = """
import json, sys
from pathlib import Path
from forge_train.config.tree import Tree
from forge_train.engine import train
from forge_train.registry.setup import make_setup

toy = str(Path(__file__).with_name("toy.py"))

def steps(count, **more):
    values = {"train": {"steps": count, "global_batch": 4, "sequence": 16}, "run": {"name": "toy"}}
    return train(make_setup(Tree.of(values), plugins=[toy]), **more)

first = steps(4)
by_name, by_path = steps(8), steps(12, resume=str(first.run))
other = steps(2, resume="never", run_dir=Path("other"))
print(json.dumps([[one.step, str(one.run)] for one in (first, by_name, by_path, other)]))
for more in ({"resume": "never"}, {"resume": "nowhere"}):
    try:
        steps(4, **more)
    except Exception as error:
        print(type(error).__name__, error)
"""


def alone(kernel: Path, script: Path, folder: Path) -> list[str]:
    """What a script prints, in an interpreter that has nothing else of Forge."""
    libraries = [sysconfig.get_path("purelib"), *site.getsitepackages()]
    # Neither the paths of an editable install (-S) nor those of the environment (-E) lead back to the others.
    command = [sys.executable, "-S", "-E", "-c", DRIVER, str(kernel), str(script), " ".join(OTHERS), *libraries]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.slow
def test_a_script_of_ten_lines_trains_with_the_kernel_alone(kernel: Path, tmp_path: Path) -> None:
    example = shutil.copytree(ROOT / "examples/kernel", tmp_path / "example")
    assert float(alone(kernel, example / "train.py", tmp_path)[-1]) < 0.5
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "outcome.json").read_text(encoding="utf-8"))["outcome"] == "done"
    assert (run / "checkpoints/latest").is_file()


@pytest.mark.slow
def test_a_run_of_the_kernel_alone_is_resumed(kernel: Path, tmp_path: Path) -> None:
    """By its name and by its path; what is there already is never taken for something else."""
    script = Path(shutil.copytree(ROOT / "examples/kernel", tmp_path / "example")) / "again.py"
    script.write_text(RESUMES, encoding="utf-8")
    ends, never, nowhere = alone(kernel, script, tmp_path)[-3:]
    assert json.loads(ends) == [[4, "runs/toy"], [8, "runs/toy"], [12, "runs/toy"], [2, "other/toy"]]
    assert never == "ConfigError runs/toy: exists; choose another run.name or folder."
    assert nowhere == "ConfigError resume: expected 'auto', 'never' or the path of a run, found 'nowhere'."
    resumed = (tmp_path / "runs/toy/events.jsonl").read_text(encoding="utf-8").count('"resumed"')
    assert resumed == 2


@pytest.mark.slow
def test_the_configuration_that_the_kernel_alone_writes_repeats_the_run(kernel: Path, tmp_path: Path) -> None:
    example = shutil.copytree(ROOT / "examples/kernel", tmp_path / "example")
    alone(kernel, example / "train.py", tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    table = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    assert table["plugins"] == [str(example / "toy.py")]
    again = make_setup(Tree.of(table)).config
    assert (again.enabled(), again.train.steps, again.train.global_batch) == (("toy",), 40, 4)


def test_the_kernel_alone_counts_no_epochs() -> None:
    values = {"train": {"epochs": 2, "global_batch": 4, "sequence": 16}}
    with pytest.raises(ConfigError) as caught:
        make_setup(Tree.of(values), plugins=[str(ROOT / "examples/kernel/toy.py")])
    assert str(caught.value) == "train.epochs: this setup counts no data; set train.steps or train.tokens instead."


MEETS = """
import os
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout

with DistributedContext.join(Layout(dp_shard=2), "cpu") as dist:
    print(dist.gather_objects((dist.rank, dist.data_rank)))
"""


@pytest.mark.slow
def test_processes_of_the_kernel_alone_meet(tmp_path: Path) -> None:
    (tmp_path / "meets.py").write_text(MEETS, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"PYTHONPATH": str(ROOT / "core"), "LOCAL_WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "meets.py"],
            cwd=tmp_path,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [process.communicate(timeout=120)[0] for process in started] == ["[(0, 0), (1, 1)]\n"] * 2


def test_the_script_has_ten_lines() -> None:
    lines = (ROOT / "examples/kernel/train.py").read_text(encoding="utf-8").split('"""', 2)[2].splitlines()
    assert len([line for line in lines if line.strip()]) <= LONGEST


def test_a_mistake_in_a_dictionary_of_sections() -> None:
    toy = str(ROOT / "examples/kernel/toy.py")
    with pytest.raises(ConfigError) as caught:
        make_setup(Tree.of({"train": {"stepz": 3}, "tray": {"x": 1}, "log": {"every": 0}}), plugins=[toy])
    assert "python: there is no section [tray]. Did you mean 'train'?" in str(caught.value)
    assert "python: train.stepz: there is no such key. Did you mean 'steps'?" in str(caught.value)
    assert "python: log.every: expected a number greater than 0, found 0." in str(caught.value)


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        ({"format": "both"}, "checkpoint.format: this setup writes no full tensors, as 'both' asks; set 'sharded'."),
        ({"best": "loss"}, "checkpoint.best: this setup saves by checkpoint.every alone; remove the key."),
        ({"mirror": "there"}, "checkpoint.mirror: this setup saves by checkpoint.every alone; remove the key."),
        ({"keep_best": 2}, "checkpoint.keep_best: this setup saves by checkpoint.every alone; remove the key."),
        (
            {"asynchronous": True},
            "checkpoint.asynchronous: this setup saves by checkpoint.every alone; remove the key.",
        ),
    ],
)
def test_what_the_kernel_alone_does_not_do_is_refused(tmp_path: Path, checkpoint: dict[str, Any], said: str) -> None:
    values = {"train": {"steps": 2, "global_batch": 4, "sequence": 16}, "checkpoint": checkpoint}
    setup = make_setup(Tree.of(values), plugins=[str(ROOT / "examples/kernel/toy.py")])
    with pytest.raises(ConfigError) as caught:
        train(setup, run_dir=tmp_path)
    assert str(caught.value) == said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"), [("train.init_from", "there"), ("train.init_missing", ["*.a"]), ("checkpoint.only", ["*.a"])]
)
def test_weights_from_elsewhere_are_refused_by_the_kernel_alone(tmp_path: Path, key: str, value: object) -> None:
    values: dict[str, dict[str, Any]] = {"train": {"steps": 2, "global_batch": 4, "sequence": 16}, "checkpoint": {}}
    section, _, name = key.partition(".")
    values[section][name] = value
    setup = make_setup(Tree.of(values), plugins=[str(ROOT / "examples/kernel/toy.py")])
    with pytest.raises(
        ConfigError, match=rf"^{re.escape(key)}: this setup begins with initial weights, and saves all; remove the key"
    ):
        train(setup, run_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"train": 5}, "python: train: expected a section [train], which is a dictionary, found 5."),
        (
            {"defaults": "adamw"},
            "python: defaults: expected a section [defaults], which is a dictionary, found 'adamw'.",
        ),
        ({"plugins": {"a": 1}}, "python: plugins: expected a list of names, found {'a': 1}."),
        ({"plugins": "toy"}, "python: plugins: expected a list of names, found 'toy'."),
        ({"preset": "dense"}, "python: preset: only files and commands name a preset."),
        ({"tray": {}}, "python: there is no section [tray]. Did you mean 'train'?"),
        ({"train": {"stepz": {}}}, "python: train.stepz: there is no such key. Did you mean 'steps'?"),
        ({"train": MappingProxyType({"stepz": 1})}, "python: train.stepz: there is no such key. Did you mean 'steps'?"),
    ],
)
def test_a_dictionary_has_no_key_that_is_ignored(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_setup(Tree.of(table), plugins=[str(ROOT / "examples/kernel/toy.py")])
    assert said in str(caught.value)

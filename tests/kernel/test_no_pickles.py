"""Only an import of a DCP folder, which a user has to ask for, can reach an unpickler with a file of a checkpoint."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forge_train
import forge_train_cli
import forge_train_contrib
import forge_train_kit
import forge_train_plugins
import forge_train_tools
import tiny_models
from forge_train.checkpoint import checkpoint

pytestmark = [pytest.mark.unit]

GUARD = """
import pickle, sys
import numpy, torch, torch._weights_only_unpickler, torch.serialization

class Reached(BaseException):
    pass

def refuse(*arguments, **options):
    raise Reached("an unpickler was reached")

class Unpickler:
    dispatch = pickle._Unpickler.dispatch
    __init__ = refuse

for module in (pickle, torch._weights_only_unpickler, torch.serialization, torch.jit):
    module.load = refuse
pickle.loads = refuse
pickle.Unpickler = pickle._Unpickler = torch._weights_only_unpickler.Unpickler = Unpickler
torch.load = refuse
plain_load = numpy.load
def load(*arguments, **options):
    assert not options.get("allow_pickle"), "an array may hold a pickle"
    return plain_load(*arguments, **options)
numpy.load = load
"""
"""Every unpickler that Python and torch have, out of reach."""


def guarded(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FORGE_TRACEBACK": "1"}
    return subprocess.run(
        [sys.executable, "-c", GUARD + code],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
    )


@pytest.mark.slow
def test_nothing_that_forge_does_with_its_checkpoints_unpickles(tmp_path: Path) -> None:
    run = tiny_models.trained(tmp_path)
    config, step = run / "config.toml", checkpoint.resolve(run)
    copy = shutil.copytree(step, tmp_path / "copy")
    for name in (".metadata", "__0_0.distcp", "pytorch_model.bin", "optimizer.pt"):  # for a reader that looks for one
        (copy / name).write_bytes(pickle.dumps({"a": 1}))
    steps = len(list((run / "checkpoints").glob("step-*")))
    assert steps
    new = ["train", str(config), "--run-dir", str(tmp_path), "--name", "new", "-q"]
    commands: list[tuple[list[str], int]] = [
        ([*new, "-s", "train.steps=4"], 0),
        ([*new, "-s", "train.steps=5"], 0),
        (["train", "--resume", str(copy), "--run-dir", str(tmp_path), "--name", "on", "-q", "-s", "train.steps=6"], 0),
        ([*new[:5], "from", "-q", "-s", f"train.init_from={copy}", "-s", "train.steps=1"], 0),
        (["checkpoint", "list", str(run)], 0),
        (["checkpoint", "verify", str(copy)], 0),
        (["checkpoint", "inspect", str(copy)], 0),
        (["checkpoint", "diff", str(step), str(copy)], 0),
        (["checkpoint", "export", str(copy), str(tmp_path / "hf")], 0),
        (["checkpoint", "copy", str(copy), str(tmp_path / "second")], 0),
        (["checkpoint", "move", str(tmp_path / "second"), str(tmp_path / "third")], 0),
        (["checkpoint", "prune", str(tmp_path / "new"), "--keep", "1"], 0),
        (["eval", str(copy)], 0),
        (["generate", str(copy), "--tokens", "1"], 0),
        (["runs", "show", str(run)], 0),
        (["checkpoint", "import", str(tmp_path / "hf"), str(tmp_path / "imported")], 0),
    ]
    code = f"""
from forge_train_cli.app import run
for command, expected in {commands!r}:
    assert run(command) == expected, command
    reached = [name for name in sys.modules if name == "torch.distributed.checkpoint" or "offline.dcp_" in name]
    assert not reached or command[1] == "import", (command, reached)
print("done")
"""
    ended = guarded(code, tmp_path)
    assert (ended.returncode, ended.stdout.strip().endswith("done")) == (0, True), ended.stderr[-3000:]


@pytest.mark.slow
def test_the_guard_notices_an_unpickler(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(1))
    uses = (
        "torch.load('a.pt', weights_only=True)",
        "torch.load('a.pt', weights_only=False)",
        "pickle.load(open('a.pickle', 'rb'))",
        "pickle.loads(open('a.pickle', 'rb').read())",
        "pickle.Unpickler(open('a.pickle', 'rb')).load()",
        "pickle._Unpickler(open('a.pickle', 'rb')).load()",
        "numpy.load('a.pickle', allow_pickle=True)",
    )
    tried = f"""
for use in {uses}:
    try:
        eval(use)
    except (Reached, AssertionError) as error:
        print(error)
"""
    ended = guarded(tried, tmp_path)
    assert ended.stdout.splitlines() == [*["an unpickler was reached"] * 6, "an array may hold a pickle"], ended.stderr


UNPICKLING = re.compile(
    r"\bpickle\.loads?\(|Unpickler|torch\.load\(|jit\.load\(|allow_pickle=True|\b(marshal|shelve|dill|joblib|cloudpickle)\b"
    r"|from torch\.distributed\.checkpoint"
)
MAY = {
    "forge_train_tools/offline/dcp.py": "writes a DCP folder",
    "forge_train_tools/offline/dcp_folder.py": "reads the chunks of a DCP folder, with weights_only",
    "forge_train_tools/offline/dcp_index.py": "reads the index of a DCP folder, and calls nothing",
    "forge_train_tools/verification/follow.py": "reads what its own processes wrote, with weights_only",
    "forge_train_tools/verification/recording.py": "reads what its own processes wrote, with weights_only",
    "forge_train_kit/data/child.py": "reads from a pipe what its own processes wrote",
}


def test_only_these_files_unpickle() -> None:
    packages = (
        *(forge_train, forge_train_cli, forge_train_contrib, forge_train_kit, forge_train_plugins, forge_train_tools),
    )
    found = {
        str(file.relative_to(folder.parent))
        for folder in (Path(package.__path__[0]) for package in packages)
        for file in folder.rglob("*.py")
        if UNPICKLING.search(file.read_text(encoding="utf-8"))
    }
    assert found == MAY.keys()


def test_what_verify_reads_is_read_with_weights_only() -> None:
    tools = Path(forge_train_tools.__path__[0])
    for file in MAY:
        if file.startswith("forge_train_tools"):
            text = (tools.parent / file).read_text(encoding="utf-8")
            assert all("weights_only=True" in call for call in re.findall(r"torch\.load\([^\n]*", text)), file

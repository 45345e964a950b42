"""The `forge` command in this process, a tiny configuration for it, and distributions that are not really installed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest

import warm
from forge_command import Ended, Forge
from forge_train_cli.app import run

TINY = """\
[train]
steps = 6
global_batch = 2
micro_batch = 2
sequence = 16
evaluate_every = 3
evaluate_batches = 1

[checkpoint]
every = 3

[log]
every = 1

[decoder]
dim = 16
layers = 1
heads = 2
max_sequence = 64

[text]
path = "corpus.txt"
baseline = false
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a tiny configuration and a corpus."""
    (tmp_path / "corpus.txt").write_text("\n".join(f"line {n}: {n * n % 97}" for n in range(400)), encoding="utf-8")
    (tmp_path / "tiny.toml").write_text(TINY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def forge(folder: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> Forge:
    """Run a command line; with `fails` it must end with that code and one message, which is given."""

    def command(*arguments: str, fails: int = 0) -> Ended:
        capsys.readouterr()
        several = "--nproc" in arguments or any(one.endswith(".zip") for one in arguments)  # a pack says how many
        with warm.ranks() if several else nullcontext():
            code = run(list(arguments))
        out, err = capsys.readouterr()
        assert code == fails, f"exit code {code}\n{out}\n{err}"
        assert "Traceback" not in err
        assert f"\n{err}".count("\nError:") == (1 if fails and fails != 75 else 0), err
        return Ended(code, out, err)

    return command


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make a distribution: its modules' sources and its entry points (group → name → object)."""

    def make(name: str, modules: Mapping[str, str], points: Mapping[str, Mapping[str, str]]) -> Path:
        root = tmp_path / f"site-{name}"
        info = root / f"{name.replace('-', '_')}-1.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n", encoding="utf-8")
        lines = [
            f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in points.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        for module, source in modules.items():
            (root / f"{module}.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(str(root))
        importlib.invalidate_caches()
        return root

    return make

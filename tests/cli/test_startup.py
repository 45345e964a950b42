"""`forge --version`, `--help` and `plugins list` are quick, and load nothing of what they show."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from forge_train_tools.bench import start_up

COMMANDS = {"--version": 5.0, "--help": 12.0, "plugins list": 12.0}
"""Command → the most CPU time, as a multiple of that of `python -c pass`."""
SLOW = ("torch", "pydantic", "rich", "tomlkit", "numpy", "forge_train_plugins", "forge_train_contrib")


@pytest.mark.e2e
@pytest.mark.parametrize("command", [*COMMANDS, "plugins list --json", "train --help", "plugins --help"])
def test_nothing_slow_is_loaded(command: str) -> None:
    source = f"""
import json, sys
sys.argv = ["forge", *{command.split()!r}]
from forge_train_cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("\\n" + json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in SLOW if name in loaded] == []


@pytest.mark.e2e
@pytest.mark.slow
def test_the_start_up_budget() -> None:
    commands = [[sys.executable, "-m", "forge_train_cli", *command.split()] for command in COMMANDS]
    ratios = dict(zip(COMMANDS, start_up(commands, 8), strict=True))
    assert {command: ratio for command, ratio in ratios.items() if ratio > COMMANDS[command]} == {}


@pytest.mark.e2e
def test_the_version() -> None:
    from forge_train import __version__

    for command in (["--version"], ["--version", "--help"]):
        done = subprocess.run(
            [sys.executable, "-m", "forge_train_cli", *command], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"forge-train {__version__}\n"


@pytest.mark.e2e
def test_a_reader_that_leaves_is_no_failure_to_shout_about() -> None:
    """`forge plugins list | head -0`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "forge_train_cli", "plugins", "list"], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert done.stderr == b""

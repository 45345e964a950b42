"""`forge plugins list | info | install`, and commands of other distributions."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_command import Forge
from forge_train.registry.discovery import in_file
from forge_train_cli.app import COMMANDS
from forge_train_cli.app import forge as app
from forge_train_cli.roles import OTHER, role

Distribution = Callable[..., Path]

PLUGIN = '''
from forge_train import Plugin, hookimpl

class Theirs(Plugin):
    """What theirs does (a paper)."""
    api = (1, 0)

    @hookimpl
    def on_step(self, step):
        pass
'''
COMMAND = """
import click

@click.command()
@click.option("--loud", is_flag=True)
def hello(loud):
    '''Say hello.'''
    click.echo("HELLO" if loud else "hello")
"""


def test_every_command_says_the_same_of_itself_as_the_list() -> None:
    """The list's summaries stand in a table, so that nothing needs to be imported for them."""
    groups = {"": (app, COMMANDS)}
    for name in COMMANDS:
        command: Any = app.get_command(None, name)  # type: ignore[arg-type]  # no context is needed
        assert command.name == name
        if hasattr(command, "table"):
            groups[name] = (command, command.table)
    for group, table in groups.values():
        for name, (_, summary) in table.items():
            inner: Any = group.get_command(None, name)  # type: ignore[arg-type]
            assert inner.name == name
            assert inner.get_short_help_str(200) == summary, name


def test_list(forge: Forge, distribution: Distribution) -> None:
    distribution(
        "their-plugins", {"theirs_module": PLUGIN}, {"forge_train.plugins": {"the-irs": "theirs_module:Theirs"}}
    )
    found = {one["name"]: one for one in forge("plugins", "list", "--json").json}
    assert found["the_irs"] == {
        "name": "the_irs",
        "distribution": "their-plugins",
        "version": "1.5",
        "object": "theirs_module:Theirs",
        "summary": "What theirs does (a paper).",
        "role": "observer",
        "default": [],
    }
    assert found["lion"]["distribution"] == "forge-train"
    assert not [name for name, one in found.items() if not one["summary"].endswith(".")], "one sentence on one line"
    assert "theirs_module" not in sys.modules
    text = forge("plugins", "list").out
    assert "What theirs does (a paper).  (their-plugins 1.5)" in text
    groups = re.split(r"^(?=[A-Z])", text, flags=re.MULTILINE)
    (observers,) = (group.partition("\n\n")[0] for group in groups if group.startswith("Observer\n"))
    assert re.findall(r"^([* ]) (\w+)", observers, re.MULTILINE) == [
        (" ", "aim"), (" ", "capture"), ("*", "console"), (" ", "csv"), (" ", "ema"), (" ", "lm_eval"), ("*", "mfu"),
        (" ", "mlflow"), (" ", "profile"), (" ", "resources"), (" ", "sample"),
        (" ", "statistics"), ("*", "tensorboard"), (" ", "trackio"), (" ", "wandb"), (" ", "the_irs"),
    ]  # fmt: skip


def test_every_built_in_plugin_has_the_role_of_its_room(forge: Forge) -> None:
    found = {one["name"]: one for one in forge("plugins", "list", "--json").json}
    assert {name for name, one in found.items() if one["role"] == OTHER} == set()
    assert found["moe"]["role"] == "experts"
    assert found["fsdp2"]["default"] == ["distributed.data_parallel"]
    assert found["console"]["default"] == ["plugins"]
    assert forge("plugins", "info", "zero1", "--json").json["role"] == "parallelism"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("    @hookimpl\n    def optimizer(self, model, job): ...", "optimizer"),
        ("    @hookimpl(trylast=True)\n    def on_log(self, record): ...", "observer"),
        ("    @hookimpl\n    def parallelize(self, job): return Transform(Phase.RECOMPUTE, 'x', f)", "memory"),
        ("    def helper(self): ...", "other"),
        ("    @hookimpl\n    def score(self): ...\n    @hookimpl\n    def on_verdict(self): ...", "other"),
    ],
)
def test_the_role_of_a_plugin_that_lies_anywhere(tmp_path: Path, body: str, says: str) -> None:
    (tmp_path / "any.py").write_text(f"class Any(Plugin):\n    api = (1, 0)\n{body}\n", encoding="utf-8")
    assert role(in_file(str(tmp_path / "any.py"))) == says


def test_info(forge: Forge) -> None:
    lion = forge("plugins", "info", "lion", "--json").json
    assert lion["hooks"] == {"optimizer": "slot"}
    (lr,) = [option for option in lion["options"] if option["key"] == "lion.lr"]
    assert (lr["type"], lr["default"], lr["required"]) == ("number > 0", 1e-4, False)
    assert lr["description"]
    decoder = forge("plugins", "info", "decoder").out
    assert "decoder.rope.theta" in decoder
    assert "build_model (slot)" in decoder
    assert "list of 2: number ≥ 0 < 1" in forge("plugins", "info", "adamw").out
    options = {option["key"]: option["default"] for option in forge("plugins", "info", "sft", "--json").json["options"]}
    assert options["sft.rename"] == {}


def test_info_of_a_dotted_plugin(forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "info_module.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(folder))
    assert forge("plugins", "info", "info_module:Theirs", "--json").json["name"] == "theirs"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["info", "lino"], "There is no plugin named 'lino'. Did you mean 'lion'?"),
        (["info", "nowhere:Thing"], "failed to import"),
        (["info"], "Missing argument"),
        (["install"], "Missing argument"),
        (["lits"], "Did you mean 'list'?"),
    ],
)
def test_mistakes(forge: Forge, arguments: list[str], says: str) -> None:
    assert says in forge("plugins", *arguments, fails=2).err


def test_install_runs_pip_here_and_names_what_is_new(
    forge: Forge, distribution: Distribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    listing = '[{"name": "lion", "summary": ""}, {"name": "fresh", "summary": "New."}]'

    def run(command: list[str], **more: Any) -> Any:
        calls.append(command)
        return SimpleNamespace(returncode=0, stdout=listing)

    monkeypatch.setattr(subprocess, "run", run)
    done = forge("plugins", "install", "-e", "./mine", "--no-deps")
    assert calls[0] == [sys.executable, "-m", "pip", "install", "-e", "./mine", "--no-deps"]
    assert done.out == "fresh  New.\nEnable with: forge train --plugins fresh\n"


def test_a_failing_pip_fails(folder: Path) -> None:
    command = [sys.executable, "-m", "forge_train_cli", "plugins", "install", "./nothing-here"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "nothing-here" in done.stderr


def test_a_command_of_another_distribution(forge: Forge, distribution: Distribution) -> None:
    distribution("their-commands", {"their_hello": COMMAND}, {"forge_train.commands": {"hello": "their_hello:hello"}})
    listing = forge("--help").out
    assert "hello  from their-commands 1.5" in listing
    assert "their_hello" not in sys.modules
    assert forge("hello", "--loud").out == "HELLO\n"
    assert "Did you mean 'hello'?" in forge("helo", fails=2).err


def test_a_broken_command_breaks_nothing_else(forge: Forge, distribution: Distribution) -> None:
    points = {"broken": "their_broken:command", "other": "their_broken_too:command", "train": "their_broken:command"}
    modules = {"their_broken": "raise OSError('no such luck')", "their_broken_too": "command = 3"}
    distribution("their-broken", modules, {"forge_train.commands": points})
    listing = forge("--help").out
    assert "broken  from their-broken 1.5" in listing
    assert "(hidden by forge's own)" in listing
    assert "failed to import: OSError: no such luck" in forge("broken", fails=2).err
    assert "is not a click command" in forge("other", fails=2).err
    assert "CONFIG" in forge("train", "--help").out


def test_two_commands_of_one_name(forge: Forge, distribution: Distribution) -> None:
    for name in ("one", "two"):
        distribution(f"{name}-dist", {}, {"forge_train.commands": {"twice": "some:thing"}})
    assert "one-dist 1.5 and two-dist 1.5 each provide" in forge("twice", fails=2).err

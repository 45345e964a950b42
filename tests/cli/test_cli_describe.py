"""`forge describe`: all of the command line, hooks and plugins as JSON, and the JSON Schema of configurations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_command import Forge

Distribution = Callable[..., Path]

THEIRS = '''
from typing import Annotated

from forge_train import Gt, Plugin, hookimpl, section

class Theirs(Plugin):
    """Does theirs."""
    api = (1, 0)

    @section
    class Config:
        width: Annotated[int, Gt(0)] = 3
        """Columns."""

    @hookimpl
    def on_step(self, step):
        pass
'''


@pytest.fixture
def outside(distribution: Distribution) -> None:
    points = {
        "forge_train.plugins": {"the-irs": "described_theirs:Theirs", "broken": "described_nowhere:Thing"},
        "forge_train.commands": {"hello": "described_hello:hello"},
    }
    modules = {"described_theirs": THEIRS, "described_hello": "raise OSError"}
    distribution("described-dist", modules, points)


@pytest.mark.slow
def test_json_describes_everything(forge: Forge, outside: None) -> None:
    done = forge("describe", "--json")
    assert "Plugin 'broken' (described-dist 1.5) failed to import" in done.err
    found = done.json
    assert found.keys() == {"version", "api", "commands", "hooks", "plugins", "schema"}
    commands = {one["name"]: one for one in found["commands"]}
    train = {option["names"][0]: option for option in commands["forge train"]["options"]}
    assert commands["forge train"]["arguments"][0]["name"] == "config"
    assert train["--max-restarts"]["default"] == 0
    assert (train["--max-restarts"]["type"], train["--max-restarts"]["min"]) == ("integer range", 0)
    assert (train["--set"]["names"], train["--set"]["several"]) == (["--set", "-s"], True)
    assert train["--quiet"]["type"] == "flag"
    assert all(option["help"] for one in found["commands"] for option in one.get("options", ()))
    assert all(one["summary"] for one in found["commands"] if "options" in one)
    assert "forge checkpoint verify" in commands
    assert commands["forge hello"] == {"name": "forge hello", "from": "described-dist 1.5"}
    assert "described_hello" not in sys.modules
    hooks = {one["hook"]: one for one in found["hooks"]}
    assert "the_irs" in hooks["on_step"]["implemented_by"]
    plugins = {one["name"]: one for one in found["plugins"]}
    assert plugins["the_irs"]["options"][0]["type"] == "integer > 0"
    assert (plugins["lion"]["role"], plugins["lion"]["distribution"]) == ("optimizer", "forge-train")
    assert "failed to import" in plugins["broken"]["error"]
    sections = found["schema"]["properties"]
    assert sections["the_irs"]["description"] == "Does theirs. (described-dist 1.5)"
    assert sections["the_irs"]["properties"]["width"]["exclusiveMinimum"] == 0
    assert sections["broken"]["type"] == "object"
    assert "Its keys are unknown" in sections["broken"]["description"]


@pytest.mark.slow
def test_the_schema_goes_to_a_file(forge: Forge, folder: Path) -> None:
    (folder / "mine.py").write_text(THEIRS.replace("Theirs", "Mine"), encoding="utf-8")
    done = forge("describe", "--schema", "-p", "./mine.py", "--out", "forge.schema.json")
    assert (done.out, done.err) == ("", "Wrote forge.schema.json.\n")
    written = json.loads((folder / "forge.schema.json").read_text(encoding="utf-8"))
    assert written["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert written["properties"]["mine"]["properties"]["width"]["description"] == "Columns."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Say one of --json"),
        (["--json", "--schema"], "Say one of --json"),
        (["--schema", "-p", "lino"], "Did you mean 'lion'?"),
        (["--schema", "--out", "nowhere/s.json"], "can't be written"),
    ],
)
def test_mistakes(forge: Forge, arguments: list[str], says: str) -> None:
    assert says in forge("describe", *arguments, fails=2).err

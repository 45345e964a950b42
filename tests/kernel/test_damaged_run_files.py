"""Damaged files of a run's folder: one sentence names the file, and looking at other runs goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_cli import forge
from forge_train import ConfigError
from forge_train.checkpoint.found import ROLL_BACK, noted_roll_back
from tiny_models import trained

pytestmark = [pytest.mark.unit]
WRONG: tuple[Any, ...] = (None, [], {}, "x", -1, 10**400, True, [[]], {"a": 1}, "\ud800")
FILES = ("plugins.json", "environment.json", "composition.json", "outcome.json", "left_out.json")
RECORDS = ("metrics.jsonl", "events.jsonl")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs."""
    folder = tmp_path_factory.mktemp("two")
    run = trained(folder, "train.evaluate_every=1", "run.name=first", "checkpoint.every=1")
    (run / "left_out.json").write_text("[[100, 102]]")
    environment = json.loads((run / "environment.json").read_text())
    environment["packages"] = {"torch": environment["packages"]["torch"]}  # damaged alike, whichever of hundreds it is
    (run / "environment.json").write_text(json.dumps(environment))
    shutil.copytree(run, run.with_name("second"))
    return run.parent


def mutated(value: Any) -> Iterator[Any]:
    """Other shapes of a value: itself, each key or entry, one of them missing, and those of what they hold."""
    yield from WRONG
    if isinstance(value, dict):
        for key in value:
            yield {name: one for name, one in value.items() if name != key}
            yield from ({**value, key: one} for one in WRONG)
            if isinstance(value[key], (dict, list)):
                yield from ({**value, key: one} for one in mutated(value[key]))
    elif isinstance(value, list) and value:
        yield from ([one, *value[1:]] for one in mutated(value[0]))


def contents(file: Path) -> Iterator[bytes]:
    """Damaged contents of a file."""
    whole = file.read_bytes()
    yield from (b"", b"\xff", b"\0" * 20 + b"\n", b"[" * 100_000 + b"\n", b"nonsense\n", whole[: len(whole) // 2])
    if file.suffix == ".json":
        yield from (json.dumps(one).encode() for one in mutated(json.loads(whole)))
        return
    lines = whole.splitlines(keepends=True)
    kinds = {json.loads(line).get("event"): at for at, line in enumerate(lines)}
    for at in kinds.values():
        for one in mutated(json.loads(lines[at])):
            yield b"".join([*lines[:at], json.dumps(one).encode() + b"\n", *lines[at + 1 :]])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"before": 2, "left_out": [[8, 12]], "elsewhere": 2, "until": 5}', "'until' is not known"),
        ('{"before": 2, "left_out": [[8, 12, 13]], "elsewhere": 2}', "entry 0 of 'left_out' is a list of 3, not of 2"),
        ('{"before": 2', "JSONDecodeError: "),
    ],
)
def test_a_note_of_a_roll_back_that_is_not_forges(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / ROLL_BACK).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"\.roll_back\.json: can't be read: {said}.*\.") as caught:
        noted_roll_back(tmp_path)
    assert isinstance(caught.value.__cause__, ValueError) == said.startswith("JSON")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FILES, *RECORDS])
def test_every_command_names_a_damaged_file_and_goes_on_with_other_runs(
    runs: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    monkeypatch.chdir(tmp_path)
    file, named = folder / "first" / name, f"{Path('runs/first') / name}: can't be read: "
    commands: dict[str, tuple[str, ...]] = {
        "list": ("list",),
        "show": ("show", "first"),
        "compare": ("compare", "first", "second", "second"),
        "report": ("report", "first", "second"),
    }
    tried = 0
    for at, content in enumerate(list(contents(file))):
        file.write_bytes(content)
        for command, arguments in list(commands.items())[at % 4 :: 4] if at > 5 else commands.items():
            ended = forge("runs", *arguments)
            said = f"{name} {content[:300]!r} {command}: {ended.err}"
            if ended.code:
                assert (ended.code, command) == (2, "show"), said
                assert named in ended.err, said
            elif ended.err:
                assert "Warning" in ended.err, said
                assert named in ended.err, said
            if command == "list":
                assert "second" in ended.out, said
            assert len(ended.err) < 600, said
            tried += 1
    assert tried > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FILES, *RECORDS])
def test_a_resume_goes_on_or_names_the_damaged_file(
    runs: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    monkeypatch.chdir(tmp_path)
    file = folder / "first" / name
    whole = list(contents(file))
    for content in whole[:6] + whole[6 :: max(len(whole) // 6, 1)]:
        file.write_bytes(content)
        for arguments in (
            ("train", "--resume", "runs/first", folder / "first" / "config.toml", "-q"),
            ("checkpoint", "list", "runs/first"),
            ("checkpoint", "prune", "runs/first", "--keep", "9"),
        ):
            ended = forge(*arguments)
            said = f"{name} {content[:300]!r} {arguments[:2]}: {ended.err}"
            assert ended.code == 0 or (ended.code == 2 and ended.err.count("\n") < 4), said
            assert "Traceback" not in ended.err, said
            assert not ended.code or name in ended.err or "had finished" in ended.err, said

"""Mutated TOML files and option lists: never a traceback, never an exit with 0 although a key was ignored.

`FORGE_EXAMPLES` is the number of examples of each test.
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from forge_cli import Ended, forge
from forge_train.base.errors import ConfigError
from forge_train.base.names import canonical
from forge_train.config.sections import CORE_SECTIONS
from forge_train.registry.discovery import discover
from forge_train_tools.configuration.presets import presets
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.configuration.toml import index_lines, read
from forge_train_tools.launching.claim import digest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

EXAMPLES = int(os.environ.get("FORGE_EXAMPLES", "100"))
usual = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="FORGE_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)

BASE: dict[str, Any] = {
    "plugins": ["lion", "ema"],
    "without": ["tensorboard"],
    "train": {"steps": 5, "global_batch": 8, "micro_batch": 4, "sequence": 64, "clip_norm": 1.0},
    "log": {"every": 2},
    "checkpoint": {"every": 5, "allow_changes": ["lion.lr"]},
    "decoder": {"dim": 32, "layers": 2, "heads": 4, "rope": {"theta": 1e4}},
    "lion": {"lr": 1e-3, "betas": [0.9, 0.99]},
    "cosine": {"warmup": 2},
}
"""A configuration with something of everything, which is fine as it is."""

KEYS = sorted(
    {*BASE, *CORE_SECTIONS, *(found.name for found in discover()), "defaults", "preset"}
    | {key for value in BASE.values() if isinstance(value, dict) for key in value}
    | {"Train", "trian", "cross-entropy", "x", "", "a.b", "é", "rope", "lr"}
)
keys = st.sampled_from(KEYS) | st.text(max_size=6)
scalars = (
    st.integers(-(10**20), 10**20)
    | st.sampled_from([0, 1, -1, 2, 4, 2**63, 10**400])
    | st.floats()
    | st.booleans()
    | st.text(max_size=8)
    | st.sampled_from(
        ["", "auto", "cpu", "lion", "adamw", "fp32", "bf16", "[", "{}", "true", "../x", "a\nb", "\0", "tiny"]
    )
)
values = st.recursive(
    scalars | st.dates() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


SOMETIMES = {
    str(name)
    for table in read(presets()["base"]).data["defaults"].values()
    if isinstance(table, dict)
    for name in table.values()
}
"""Defaults for several processes, for a precision: their sections may stand in a file that is used without them."""


def paths(table: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths(value, (*prefix, key))


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """BASE after some mutations: a key renamed, removed, replaced, put where it does not belong."""
    table = json.loads(json.dumps(BASE))
    for _ in range(draw(st.integers(0, 3))):
        if not (known := list(paths(table))):
            break
        path = draw(st.sampled_from(known))
        inside = table
        for part in path[:-1]:
            inside = inside[part]
        what = draw(st.sampled_from(["remove", "replace", "rename", "add", "nest", "empty"]))
        if what == "remove":
            del inside[path[-1]]
        elif what == "replace":
            inside[path[-1]] = draw(values)
        elif what == "rename":
            inside[draw(keys)] = inside.pop(path[-1])
        elif what == "add":
            inside[draw(keys)] = draw(values)
        elif what == "nest":
            inside[path[-1]] = {draw(keys): inside[path[-1]]}
        else:
            inside[path[-1]] = {}
    return table


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def leaves(table: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value of a table, empty tables among them."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def taken(config: Any, path: tuple[str, ...], value: Any) -> bool:
    """Whether a value of a file shows in the configuration that came of it."""
    section, *rest = path
    name = canonical(section)
    if name in ("plugins", "without", "preset") or name in SOMETIMES - set(config.enabled()):
        return True
    if name == "defaults":
        return canonical(str(value)) in {*config.defaults.values(), "", *config.enabled()} or "." in ".".join(rest)
    found: Any = config.everything().get(name)
    if found is None:
        return False
    if not rest:
        return value == {}
    for part in rest:
        found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
        if found is None:
            return False
    return same(found, value)


def same(found: Any, value: Any) -> bool:
    if isinstance(value, list):
        return isinstance(found, tuple) and all(same(a, b) for a, b in zip(found, value, strict=True))
    if value == {}:
        return not isinstance(found, (int, float, str, tuple))
    return bool(found == value) and isinstance(found, bool) == isinstance(value, bool)


def settle(ended: Ended) -> None:
    """Zero, or two with one message."""
    assert ended.code in (0, 2), ended
    assert "Traceback (most recent call last)" not in ended.out + ended.err
    if ended.code:
        assert ended.err.startswith(("Error: ", "Usage: ")), ended.err


@pytest.mark.slow
@usual
@given(table=configurations())
@example(table=BASE)
@example(table={**BASE, "decoder": {**BASE["decoder"], "ropes": {}}})
@example(table={**BASE, "plugins": {"lion": True}})
@example(table={**BASE, "plugins": [[]]})
@example(table={**BASE, "train": []})
@example(table={**BASE, "run": {"name": "\0"}})
@example(table={**BASE, "cross-entropy": {"z_loss": 1.0}, "cross_entropy": {"z_loss": 2.0}})
def test_mutated_files(folder: Path, table: dict[str, Any]) -> None:
    file = folder / "my.toml"
    file.write_text(tomlkit.dumps(table), encoding="utf-8")
    written = tomllib.loads(file.read_text(encoding="utf-8"))
    ended = forge("config", "show", file, "--json")
    settle(ended)
    if ended.code == 0:
        config = resolve(Request(config=str(file))).config
        for path, value in leaves(written):
            left_out = canonical(path[0]) in map(canonical, written.get("without", ()))
            assert left_out or taken(config, path, value), (path, value)


@pytest.mark.slow
@usual
@given(text=st.text(max_size=60) | st.binary(max_size=40), at=st.integers(0, 400), cut=st.integers(0, 30))
@example(text="\ufeff", at=0, cut=0)
@example(text="[" * 3000, at=0, cut=0)
@example(text="x = " + "9" * 5000 + "\n", at=0, cut=0)
@example(text=b"\x00", at=5, cut=0)
@example(text='"""', at=100, cut=3)
def test_damaged_text(folder: Path, text: str | bytes, at: int, cut: int) -> None:
    whole = tomlkit.dumps(BASE).encode()
    patch = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    content = whole[:at] + patch + whole[at + cut :]
    file = folder / "my.toml"
    file.write_bytes(content)
    settle(forge("config", "show", file, "--json"))
    try:
        decoded = content.decode()
        tomllib.loads(decoded.replace("\r\n", "\n"))
    except (ValueError, RecursionError):
        return
    index_lines(decoded)


OPTIONS = st.lists(
    st.tuples(st.sampled_from(["--set", "-s", "--plugins", "-p", "--without"]), st.text(max_size=10))
    | st.tuples(
        st.sampled_from(["--set", "-s"]),
        st.builds(
            lambda section, key, value: f"{section}.{key}={value}",
            st.sampled_from(
                ["train", "log", "lion", "adamw", "decoder", "decoder.rope", "defaults", "run", "text", "x"]
            ),
            st.sampled_from(
                ["steps", "every", "lr", "dim", "theta", "optimizer", "loss", "name", "path", "seed", "x", "betas"]
            ),
            scalars.map(str) | st.sampled_from(["1,2", "0.9,0.99", "[1, 2]", "lion", "cosine", ".5", "1e-3", "a\nb=1"]),
        ),
    )
    | st.tuples(
        st.sampled_from(["--plugins", "-p", "--without"]),
        st.lists(st.sampled_from([*KEYS, "lion", "ema", "a:B", ":", "toys:Absent", "json:loads"]), max_size=3).map(
            ",".join
        ),
    ),
    max_size=4,
)


@pytest.mark.slow
@usual
@given(options=OPTIONS, environment=st.sampled_from(["", ";", "log.every=3", "x", "train.steps=7;lion.lr=1"]))
@example(options=[("-s", "train.steps=5\nlog.every=3")], environment="")
@example(options=[("-s", "preset.x=1")], environment="")
@example(options=[("-s", "plugins.lion=1")], environment="")
@example(options=[("-p", "lion,adamw")], environment="")
@example(options=[("-p", "tensorboard")], environment="")
@example(options=[("--without", "decoder")], environment="")
@example(options=[("-s", "run.seed=" + "9" * 30)], environment="")
def test_option_lists(folder: Path, options: list[tuple[str, str]], environment: str) -> None:
    file = folder / "my.toml"
    if not file.exists():
        file.write_text(tomlkit.dumps(BASE), encoding="utf-8")
    arguments = [part for option in options for part in option]
    ended = forge("config", "show", file, "--json", *arguments, environment={"FORGE_SET": environment})
    settle(ended)
    if ended.code:
        return
    names = {"--plugins": "plugins", "-p": "plugins", "--without": "without", "--set": "set", "-s": "set"}
    asked: dict[str, list[str]] = {"plugins": [], "without": [], "set": []}
    for option, text in options:
        asked[names[option]] += [text] if names[option] == "set" else [part.strip() for part in text.split(",")]
    config = resolve(
        Request(
            config=str(file),
            plugins=tuple(asked["plugins"]),
            without=tuple(asked["without"]),
            set=tuple(asked["set"]),
            environment=environment,
        )
    ).config
    enabled = set(config.enabled())
    removed = {canonical(name) for name in asked["without"]}
    for name in asked["plugins"]:
        assert canonical(name) in enabled | removed
    assert not enabled & removed
    last = {}
    for assignment in asked["set"]:
        key, _, text = assignment.partition("=")
        last[tuple(part.strip() for part in key.split("."))] = text.strip()
    for path, text in last.items():
        if path[0] == "defaults" or canonical(path[0]) in removed:
            continue
        shown: Any = config.everything()[canonical(path[0])]
        for part in path[1:]:
            shown = getattr(shown, part)
        assert isinstance(shown, tuple) or str(shown) == text or shown == _number(text), (path, text, shown)


def _number(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


@settings(usual, max_examples=max(EXAMPLES // 10, 10))
@given(table=configurations())
def test_what_resolves_is_written_and_read_as_the_same(folder: Path, table: dict[str, Any]) -> None:
    from forge_train.loop.describe import to_toml

    file, again = folder / "my.toml", folder / "again.toml"
    file.write_text(tomlkit.dumps(table), encoding="utf-8")
    try:
        first = resolve(Request(config=str(file)))
    except ConfigError:
        return
    again.write_text(to_toml(first.config, first.hooks), encoding="utf-8")
    second = resolve(Request(config=str(again)))
    assert digest(second.config) == digest(first.config)
    assert second.config.enabled() == first.config.enabled()


@settings(usual, max_examples=max(EXAMPLES // 15, 10))
@given(table=configurations())
def test_training_is_refused_before_anything_is_written(folder: Path, table: dict[str, Any]) -> None:
    """What `config show` refuses, `train` refuses too, and leaves nothing behind."""
    file = folder / "my.toml"
    file.write_text(tomlkit.dumps(table), encoding="utf-8")
    if forge("config", "show", file).code == 0:
        return
    shutil.rmtree(folder / "runs", ignore_errors=True)
    ended = forge("train", file, "--quiet")
    settle(ended)
    assert ended.code == 2
    assert not (folder / "runs").exists()

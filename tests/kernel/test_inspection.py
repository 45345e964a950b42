"""An author's first mistakes with hooks: each is told at start-up, with its place and what to write instead."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pluggy
import pytest

import toys
from forge_cli import forge, one_message
from forge_train import ConfigError, Plugin, PluginError, hookimpl
from forge_train.base.format import place
from forge_train.base.names import PluginRef
from forge_train.plugin.calls import EnabledPlugin
from forge_train.registry.declared import Specs
from forge_train.registry.discovery import DISTRIBUTION, discover, load
from forge_train_tools.configuration.inspection import inspector
from forge_train_tools.testing import Installed, installed

SPECS = Specs([])
"""Forge's own hooks."""
pytestmark = pytest.mark.unit
HERE = Path(__file__).name


def told(cls: type[Plugin]) -> list[str]:
    return inspector()(EnabledPlugin(PluginRef("x", "dist", "1", "m:X"), cls, specs=SPECS))


def plugin(**members: Any) -> type[Plugin]:
    return type("X", (toys.Bare,), members)


# -- the decorator --------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", SPECS)
def test_a_method_with_a_hooks_name_and_without_the_decorator(hook: str) -> None:
    def method(self: Any) -> None: ...

    class Helper:
        """No plugin: what it has is inherited all the same."""

    setattr(Helper, hook, method)
    mixed = type("X", (Helper, Plugin), {"another": hookimpl(lambda self: None)})
    for cls in (type("X", (Plugin,), {hook: method}), mixed, type("Y", (mixed,), {})):
        (first, *_) = told(cls)
        assert f"Plugin 'x' (dist 1): {cls.__name__}.{hook} (" in first
        assert f"{HERE}:" in first
        assert "is named like a hook, but is not marked with @hookimpl. Write @hookimpl above it" in first


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (staticmethod(lambda step: None), "is not marked with @hookimpl"),
        (classmethod(lambda cls, step: None), "is not marked with @hookimpl"),
        (property(lambda self: None), "but is a property"),
        (functools.cached_property(lambda self: None), "but is a cached_property"),
        (functools.partial(print), "but is a partial"),
        (pluggy.HookimplMarker("another")(lambda self, step: None), "is not marked with @hookimpl"),
        (types.SimpleNamespace, "is named like a hook, but is a type"),
    ],
)
def test_whatever_has_a_hooks_name_and_could_be_called(member: Any, says: str) -> None:
    (message,) = told(plugin(on_step=member))
    assert says in message


def test_values_with_a_hooks_name_are_left_alone_and_switch_an_inherited_hook_off() -> None:
    assert not told(plugin(optimizer=None, loss=0.0, task="x"))


def test_an_override_without_the_decorator() -> None:
    class Base(Plugin):
        @hookimpl
        def on_step(self, step: Any) -> None: ...

    class Child(Base):
        def on_step(self, step: Any) -> None: ...

    assert not told(Base)
    assert "Child.on_step" in told(Child)[0]


def test_a_plugin_without_any_hook() -> None:
    class Empty(Plugin): ...

    class Nearly(Plugin):
        def on_steps(self, step: Any) -> None: ...

    (message,) = told(Empty)
    assert message.startswith("Plugin 'x' (dist 1) implements no hook: class ")
    assert f"{HERE}:" in message
    assert "has no method marked with @hookimpl." in message
    assert told(Nearly)[0].endswith("It has 'on_steps'. Did you mean 'on_step'?")


def test_the_decorator_in_every_place_that_python_allows() -> None:
    class Fine(Plugin):
        @hookimpl
        @staticmethod
        def on_step(step: Any) -> None: ...

        @classmethod
        @hookimpl
        def on_start(cls, job: Any) -> None: ...

        @hookimpl
        @classmethod
        def on_log(cls, record: Any) -> None: ...

        on_end = hookimpl(lambda self: None)

    assert not told(Fine)


def test_the_decorator_with_parentheses() -> None:
    for given, shown in (({}, "@hookimpl()"), ({"tryfirst": True}, "@hookimpl(tryfirst=True)")):
        with pytest.raises(PluginError) as caught:
            hookimpl(**given)
        assert str(caught.value) == f"write @hookimpl without parentheses and options, found {shown}"
    with pytest.raises(PluginError, match="@hookimpl marks a method, found a property"):
        hookimpl(property(lambda self: None))  # type: ignore[type-var]


def test_every_plugin_of_forge_is_without_a_mistake() -> None:
    for found in (one for one in discover() if one.distribution == DISTRIBUTION and one.file):
        assert not inspector()(EnabledPlugin(found, load(found), specs=SPECS))


# -- arguments ------------------------------------------------------------------------------------


def _generates(self: Any, step: Any) -> Iterator[None]:
    yield


async def _awaits(self: Any, step: Any) -> None: ...


@pytest.mark.parametrize(
    ("hook", "method", "says"),
    [
        ("on_start", lambda self, modell: None, "takes 'modell', which the hook does not have. It has model, "),
        ("on_start", lambda self, optim: None, "takes 'optim', which the hook does not have. It has optimizer, "),
        ("on_step", lambda self, result: None, "takes 'result', which the hook does not have. It has step."),
        ("on_step", lambda step: None, "lacks `self`, its first argument."),
        ("on_step", lambda: None, "lacks `self`, its first argument."),
        ("on_step", lambda self, *rest: None, "takes *rest, which would stay empty. Name what it needs of step."),
        ("on_step", lambda self, **rest: None, "takes **rest, which would stay empty."),
        ("on_step", lambda self, *, step: None, "takes 'step' after a `*`."),
        ("on_step", lambda self, step=None, /: None, "takes 'step' before a `/`. Remove the `/`: hooks get"),
        ("on_step", _generates, "contains `yield`, so nothing would run it."),
        ("on_step", _awaits, "is `async`, so nothing would run it."),
    ],
)
def test_arguments_that_do_not_fit(hook: str, method: Any, says: str) -> None:
    (message,) = told(plugin(**{hook: hookimpl(method)}))
    assert message.startswith(f"Plugin 'x' (dist 1) does not fit the hooks: {hook} (")
    assert f"{HERE}:{method.__code__.co_firstlineno})" in message
    assert says in message


def test_options_of_pluggys_own_marker() -> None:
    marked = pluggy.HookimplMarker("forge_train")(tryfirst=True)(lambda self, step: None)
    (message,) = told(plugin(on_step=marked))
    assert "is marked with options (tryfirst), which have no effect." in message


def test_a_place_is_that_of_the_function_inside() -> None:
    def function() -> None: ...

    @functools.wraps(function)
    def wrapper() -> None: ...

    line = function.__code__.co_firstlineno
    for member in (function, wrapper, staticmethod(function), property(function), functools.partial(function)):
        assert place(member).endswith(f"{HERE}:{line}")
    assert place(PluginRef("x", "", "", "")).endswith("names.py:" + place(PluginRef).rpartition(":")[2])
    assert place(3) == "builtins.int"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("requires", "loss", "`requires` must be a tuple of strings, like (\"a\",), found 'loss'."),
        ("conflicts", ["a"], "`conflicts` must be a tuple of strings"),
        ("devices", ("cuda", 0), "`devices` must be a tuple of strings"),
        ("needs", ("wandb",), "`needs` must say which command installs which module, found ('wandb',)."),
        ("state_dict", lambda self: {}, "has state_dict alone; without its counterpart nothing is saved."),
    ],
)
def test_what_a_class_says_of_itself(name: str, value: Any, says: str) -> None:
    (message,) = told(plugin(**{name: value}))
    assert message.startswith("Plugin 'x' (dist 1)")
    assert says in message


# -- at start-up ----------------------------------------------------------------------------------


def test_all_of_it_is_told_at_start_up_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(Plugin):
        def on_step(self, step: Any) -> None: ...

        @hookimpl
        def on_log(self, line: Any) -> None: ...

    monkeypatch.chdir(tmp_path)
    with installed([Forgetful]):
        message = one_message(forge("train", toys.write_config(tmp_path), "-p", "forgetful"), 2)
        checked = forge("plugins", "check", "forgetful")
    assert not (tmp_path / "runs").exists()
    for text in ("is named like a hook, but is not marked with @hookimpl", "takes 'line'"):
        assert text in message
        assert text in checked.out
    assert checked.code == 1


def test_a_failing_import_names_its_line_and_advises_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forge_plugins: Installed
) -> None:
    body = "from forge_train import Plugin, hookimpl\n\nclass A(Plugin):\n    @hookimpl()\n    def on_step(self): ...\n"
    (tmp_path / "parenthesised.py").write_text(body, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    forge_plugins.restore()
    forge_plugins.add_broken("theirs", "parenthesised:A")
    file = toys.write_config(tmp_path)
    reason = f"failed to import: write @hookimpl without parentheses and options, found @hookimpl() ({tmp_path}"
    named = one_message(forge("train", file, "-p", "theirs"), 2)
    assert reason in named
    assert "parenthesised.py:4). `forge plugins check theirs` shows the traceback." in named
    assert "--without" not in named
    file.write_text(file.read_text().replace("plugins = [", 'plugins = ["theirs", '))
    assert one_message(forge("train", file), 2).endswith("Leave it out with `--without theirs`.")
    assert "--without" not in one_message(forge("plugins", "info", "theirs"), 2)
    dotted = one_message(forge("plugins", "info", "parenthesised:A"), 2)
    assert "`forge plugins check parenthesised:A`" in dotted
    (tmp_path / "wrong_syntax.py").write_text("def f(:\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"SyntaxError: .* \(.*wrong_syntax.py:1\)"):
        load(PluginRef("x", "", "", "wrong_syntax:A"))
    sys.modules.pop("parenthesised", None)


def test_a_class_without_a_mistake_is_looked_at_again_once_it_changes() -> None:
    cls = plugin(requires=("model",))
    assert told(cls) == told(cls) == []
    cls.requires = "model"  # type: ignore[assignment]
    assert "`requires` must be a tuple of strings" in told(cls)[0]

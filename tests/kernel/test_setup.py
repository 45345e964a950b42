"""Which plugins are enabled, and what is said when they can't be."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_train import ConfigError, Plugin, PluginError, hookimpl, section
from forge_train.base.errors import Problem
from forge_train.base.names import PluginRef, canonical, snake
from forge_train.registry.discovery import NO_DISTRIBUTION, discover, dotted, load
from forge_train.registry.setup import Setup
from forge_train_kit.source import Source
from forge_train_tools.configuration.presets import presets
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.testing import Installed

pytestmark = pytest.mark.unit


@pytest.fixture
def here(forge_plugins: Installed) -> Installed:
    """Forge's own plugins, a toy model and toy data."""
    forge_plugins.restore()
    forge_plugins.add(toys.ToyModel)
    forge_plugins.add(toys.ToyData)
    return forge_plugins


def ask(*plugins: str, **more: Any) -> Setup:
    without = ("console", "copies", "mfu", "out_of_memory", "tensorboard", *more.pop("without", ()))
    sets = ("train.steps=2", *more.pop("set", ()))
    return resolve(Request(plugins=("toy_model", "toy_data", *plugins), without=without, set=sets, **more))


def refused(*plugins: str, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ask(*plugins, **more)
    assert caught.value.code == 2
    return str(caught.value)


class Optimizer(Plugin):
    """An optimizer from elsewhere."""

    api = (1, 0)

    @section
    class Config:
        lr: float = 0.1

    @hookimpl
    def optimizer(self, model: Any, job: Any) -> Any: ...


# -- slots and defaults ---------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_defaults_fill_the_slots_that_nobody_else_fills() -> None:
    made = ask()
    assert made.config.defaults == {
        "attention": "gqa",
        "attention_kernel": "sdpa",
        "executor": "sequential",
        "feed_forward": "swiglu",
        "head": "lm_head",
        "loss": "cross_entropy",
        "lr_schedule": "cosine",
        "optimizer": "adamw",
        "task": "next_token",
        "tokenizer": "tokenizer",
    }
    assert made.hooks.provider("build_model") == "toy_model"


@pytest.mark.usefixtures("here")
def test_a_default_steps_aside_for_an_enabled_provider() -> None:
    made = ask("lion")
    assert made.hooks.provider("optimizer") == "lion"
    assert "adamw" not in made.config.enabled()
    assert "optimizer" not in made.config.defaults


def test_two_enabled_providers_are_an_error_that_names_both(here: Installed) -> None:
    here.add(Optimizer, name="mine", distribution="forge-mine", version="2.1")
    message = refused("lion", "mine")
    assert message == (
        f"Plugins {load_label('lion')} and 'mine' (forge-mine 2.1) both fill the slot 'optimizer'; "
        "leave lion or mine out of --plugins."
    )


CONTRADICTION = "--without {}: --plugins asks for it too; leave one of the two out."


@pytest.mark.usefixtures("here")
def test_a_plugin_is_not_asked_for_and_left_out_at_once() -> None:
    assert refused("lion", without=["lion"]) == CONTRADICTION.format("lion")


class Text(Plugin):
    """Bears the name of a plugin that is installed, and does something else."""

    api = (1, 0)

    @hookimpl
    def on_log(self, record: Any) -> None: ...


@pytest.mark.usefixtures("here")
def test_a_class_named_like_an_installed_plugin_is_told_so() -> None:
    label = load_label("text")
    assert refused("test_setup:Text") == (
        "base.toml:10: defaults.build_data: plugin 'text' does not fill the slot 'build_data'.\n"
        "--plugins: test_setup:Text is named after its class, so it takes the place of the installed plugin "
        f"{label}. Rename the class to have both."
    )
    assert "are both 'text'.\n--plugins: test_setup:Text is named after its class" in refused("text", "test_setup:Text")


@pytest.mark.usefixtures("here")
def test_allowed_changes_name_keys_that_there_are() -> None:
    assert refused(set=["checkpoint.allow_changes=adamw.lrr"]) == (
        "--set checkpoint.allow_changes=adamw.lrr: checkpoint.allow_changes: there is no key 'adamw.lrr'. "
        "Did you mean 'adamw.lr'?"
    )
    ask(set=["checkpoint.allow_changes=adamw.lr,lion,lion.lr,text"])  # a plugin that the checkpoint may have had


def load_label(name: str) -> str:
    return next(found.label for found in discover() if found.name == name)


def test_a_provider_of_the_users_file_needs_without(here: Installed, tmp_path: Path) -> None:
    here.add(Optimizer, name="mine")
    file = tmp_path / "my.toml"
    file.write_text("plugins = ['mine']\n[mine]\nlr = 0.5\n", encoding="utf-8")
    assert "both fill the slot 'optimizer'" in refused("lion", config=str(file))
    made = ask("lion", config=str(file), without=["mine"])
    assert made.hooks.provider("optimizer") == "lion"  # and its section goes with it
    assert ask(config=str(file)).config.sections["mine"].lr == 0.5


def test_the_option_brings_back_what_the_file_left_out(here: Installed, tmp_path: Path) -> None:
    here.add(Optimizer, name="mine")
    file = tmp_path / "my.toml"
    file.write_text("plugins = ['mine']\nwithout = ['mine', 'gqa']\n", encoding="utf-8")
    assert ask(config=str(file)).hooks.provider("optimizer") == "adamw"
    assert ask("mine", config=str(file)).hooks.provider("optimizer") == "mine"


@pytest.mark.usefixtures("here")
def test_a_slot_that_nobody_fills() -> None:
    assert refused(without=["adamw"]) == "No enabled plugin fills the slot 'optimizer'; see `forge plugins list`."
    assert refused(set=["defaults.optimizer="]) == refused(without=["adamw"])


@pytest.mark.usefixtures("here")
def test_another_default_can_be_named() -> None:
    made = ask(set=["defaults.optimizer=lion", "lion.lr=0.5"])
    assert made.hooks.provider("optimizer") == "lion"
    assert made.config.plugins == ("toy_data", "toy_model")


@pytest.mark.usefixtures("here")
def test_the_section_of_a_displaced_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text("[adamw]\nlr = 0.5\n", encoding="utf-8")
    known = presets()
    monkeypatch.setattr("forge_train_tools.configuration.request.presets", lambda: {**known, "mine": preset})
    assert "adamw" not in ask("lion", config="mine").config.sections  # dropped with a note
    assert ask(config="mine").config.sections["adamw"].lr == 0.5
    aside = "section [adamw] has no effect, because 'lion' takes the place of 'adamw'"
    told = f"{aside}: remove it, or keep it with --without adamw."
    assert f"--set adamw.eps=1: {aside}: leave it out." in refused("lion", config="mine", set=["adamw.eps=1"])
    own = tmp_path / "own.toml"
    for text in ("preset = 'mine'\n[adamw]\nlr = 0.1\n", "preset = 'mine'\n[adamw]\n"):
        own.write_text(text, encoding="utf-8")
        assert f"{own}:2: {told}" in refused("lion", config=str(own))
        assert ask("lion", config=str(own), without=["adamw"]).hooks.provider("optimizer") == "lion"


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_unknown_plugins_are_told_all_at_once_with_the_nearest() -> None:
    assert refused("loin", "xyzzy", set=["defaults.loss=cross_entropi"]).splitlines() == [
        "--plugins: there is no plugin named 'loin'. Did you mean 'lion'?",
        (
            "--plugins: there is no plugin named 'xyzzy'. `forge plugins list` shows those that are installed; "
            "`forge plugins install PACKAGE` adds others."
        ),
        "defaults.loss: there is no plugin named 'cross_entropi'. Did you mean 'cross_entropy'?",
    ]


def test_a_plugin_of_a_file_is_told_with_its_line(here: Installed, tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("# mine\nplugins = ['loin']\n", encoding="utf-8")
    assert refused(config=str(file)) == f"{file}:2: there is no plugin named 'loin'. Did you mean 'lion'?"


@pytest.mark.usefixtures("here")
def test_without_what_would_not_be_enabled() -> None:
    assert refused(without=["admw"]) == "--without: 'admw' would not be enabled anyway. Did you mean 'adamw'?"


def test_hyphens_and_underscores_are_equal(here: Installed) -> None:
    here.add(Optimizer, name="my-own")
    assert ask("my-own").hooks.provider("optimizer") == "my_own"
    assert ask("my_own", set=["my-own.lr=0.5"]).config.sections["my_own"].lr == 0.5
    assert refused("my-own", without=["my_own"]) == CONTRADICTION.format("my_own")


def test_a_name_that_two_distributions_use(here: Installed) -> None:
    from forge_train.registry import discovery

    def two() -> Iterator[PluginRef]:
        for distribution in ("forge-b", "forge-a"):
            yield PluginRef("mine", distribution, "1", "test_setup:Optimizer")

    discovery.SOURCES[:] = [here, two]  # `forge_plugins` puts back what was there
    assert refused("mine") == "--plugins: the name 'mine' is used by forge-a 1 and forge-b 1; uninstall one."
    assert ask().hooks.provider("optimizer") == "adamw"  # and whoever does not ask for it is not disturbed


def test_reserved_names(here: Installed) -> None:
    here.add(Optimizer, name="train", distribution="forge-x")
    assert refused("train") == "--plugins: forge-x names a plugin 'train', which is reserved."


@pytest.mark.usefixtures("here")
def test_dotted_plugins() -> None:
    made = ask("test_setup:Optimizer", set=["optimizer.lr=0.5"])
    assert made.config.enabled().count("optimizer") == 1
    assert made.config.sections["optimizer"].lr == 0.5
    assert made.config.plugins == ("test_setup:Optimizer", "toy_data", "toy_model")
    assert refused("test_setup:Optimizer", without=["optimizer"]) == CONTRADICTION.format("optimizer")


class Train(Plugin):
    """Its name is reserved."""


class Lion(Optimizer):
    """Another one of that name."""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("test_setup:", "--plugins: 'test_setup:': expected a plugin's name, or package.module:Class."),
        (":Lion", "expected a plugin's name, or package.module:Class."),
        ("..setup:Lion", "expected a plugin's name, or package.module:Class."),
        ("a:b:c", "expected a plugin's name, or package.module:Class."),
        ("test_setup:Train", "--plugins: 'test_setup:Train' would be named 'train', which is reserved."),
        ("test_setup:Absent", "Plugin 'absent' (no distribution): module 'test_setup' has no 'Absent'."),
        ("test_setup:Path", "'test_setup:Path' is not a class derived from forge_train.Plugin."),
        ("test_setup:ask", "'test_setup:ask' is not a class derived from forge_train.Plugin."),
        ("absent_module:X", "Plugin 'x' (no distribution) failed to import: ModuleNotFoundError: No module named"),
        ("test_setup:Lion,lion", "are both 'lion'."),
    ],
)
def test_dotted_specs_that_name_no_plugin(spec: str, says: str) -> None:
    assert says in refused(*spec.split(","))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Lion", "lion"),
        ("AdamW", "adam_w"),
        ("GQAttention", "gq_attention"),
        ("EMA", "ema"),
        ("Fp8Linear", "fp8_linear"),
    ],
)
def test_a_class_is_named_in_snake_case(name: str, expected: str) -> None:
    assert snake(name) == expected


def test_the_label_of_a_plugin() -> None:
    assert PluginRef("fp8", "forge-train", "0.1", "a:B").label == "'fp8' (forge-train 0.1)"
    assert dotted("toys:ToyModel").label == "'toy_model' (no distribution)"
    assert canonical(" a-b ") == "a_b"


def test_the_distribution_of_a_dotted_spec() -> None:
    """Told by top_level.txt or by RECORD, of a package and of a single module; its name may be another one."""
    known = importlib.metadata.packages_distributions()
    for package in ("yaml", "typing_extensions", "pluggy", "_pytest", "torch", "toys"):
        owner = known.get(package, [NO_DISTRIBUTION])[0]
        version = importlib.metadata.version(owner) if owner != NO_DISTRIBUTION else ""
        assert dotted(f"{package}.inner:Mine") == PluginRef("mine", owner, version, f"{package}.inner:Mine")


# -- contrib --------------------------------------------------------------------------------------


def test_a_file_dropped_into_contrib_is_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_train.registry import discovery

    package = tmp_path / "contrib_here"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('listing imports nothing')", encoding="utf-8")
    (package / "_private.py").write_text("", encoding="utf-8")
    (package / "swish-glu.py").write_text(
        '"""Mine."""\nfrom forge_train import Plugin\n\n\n'
        'class Anything(Plugin):\n    """What it does.\n\n    More."""\n',
        encoding="utf-8",
    )
    (package / "two.py").write_text(
        "from forge_train import Plugin\nclass A(Plugin): ...\nclass B(Plugin): ...\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(discovery, "CONTRIB", "contrib_here")
    found = {one.name: one for one in discovery.contributed()}
    assert sorted(found) == ["swish_glu", "two"]
    assert Source(found["swish_glu"]).summary == "What it does."
    assert found["swish_glu"].file == package / "swish-glu.py"
    assert "contrib_here" not in sys.modules
    (package / "__init__.py").write_text("", encoding="utf-8")
    assert load(found["swish_glu"]).__name__ == "Anything"
    with pytest.raises(ConfigError, match="must define exactly one plugin class, found A, B"):
        load(found["two"])


# -- relations ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requires", "fine"),
    [
        (("optimizer",), True),
        (("lion",), False),
        (("loss_scale",), False),
        (("toy-model",), True),
        (("relate",), False),
    ],
)
def test_requires(here: Installed, requires: tuple[str, ...], fine: bool) -> None:
    class Relate(toys.Bare):
        pass

    Relate.requires = requires
    here.add(Relate)
    if fine:
        ask("relate")
    else:
        what = "enable a plugin that fills it, like 'loss_scaler'," if requires == ("loss_scale",) else "enable it"
        expected = f"Plugin 'relate' (under-test 0) requires {requires[0]!r}; {what} with --plugins."
        assert refused("relate") == expected


@pytest.mark.parametrize(
    ("conflicts", "other"), [(("optimizer",), "adamw"), (("toy-data",), "toy_data"), (("lion",), "")]
)
def test_conflicts(here: Installed, conflicts: tuple[str, ...], other: str) -> None:
    class Relate(toys.Bare):
        pass

    Relate.conflicts = conflicts
    here.add(Relate)
    if other:
        assert refused("relate") == f"Plugins 'relate' and {other!r} can't be enabled together."
    else:
        ask("relate")


def test_needs(here: Installed) -> None:
    class Needy(toys.Bare):
        needs = {"no_such_module.inner": "pip install no-such", "json": "pip install json"}

    here.add(Needy)
    expected = "Plugin 'needy' (under-test 0) needs 'no_such_module.inner'. Install it: pip install no-such"
    assert refused("needy") == expected


# -- broken plugins -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "fine"),
    [((1, 0), True), ((1, 1), False), ((2, 0), False), ((0, 9), False), ("1.0", False), (1, False), ((1,), False)],
)
def test_the_api_a_plugin_was_written_for(here: Installed, api: Any, fine: bool) -> None:
    class Written(toys.Bare):
        pass

    Written.api = api
    here.add(Written, distribution="forge-w", version="3")
    if fine:
        ask("written")
    else:
        assert "Plugin 'written' (forge-w 3)" in refused("written")
        assert ("was written for plugin API" in refused("written")) == (isinstance(api, tuple) and len(api) == 2)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise RuntimeError('on import\\nmore')", "failed to import: RuntimeError: on import (/"),
        ("import no_such_module", "failed to import: ModuleNotFoundError: No module named 'no_such_module' (/"),
        ("def f(:", "failed to import: SyntaxError: "),
        ("raise SystemExit(3)", "failed to import: SystemExit: 3 (/"),
        ("from forge_train import Nothing", "failed to import: ImportError: "),
    ],
)
def test_a_plugin_that_fails_to_import(
    here: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, says: str
) -> None:
    (tmp_path / "broken_one.py").write_text(body, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    here.add_broken("broken", "broken_one:Broken", distribution="forge-broken", version="1")
    ask()  # whoever does not enable it is not disturbed
    message = refused("broken")
    assert f"Plugin 'broken' (forge-broken 1) {says}" in message
    assert "`forge plugins check broken`" in message


def test_misspelt_hooks_are_told_with_the_nearest(here: Installed) -> None:
    class Typo(Plugin):
        @hookimpl
        def on_stepp(self, step: Any) -> None: ...

        @hookimpl
        def optimiser(self, model: Any, job: Any) -> None: ...

        @hookimpl
        def zzz(self) -> None: ...

    here.add(Typo)
    assert re.sub(r"[^ (]+test_setup.py:\d+", "…", refused("typo")).splitlines() == [
        "Plugin 'typo' (under-test 0) implements unknown hook 'on_stepp' (…). Did you mean 'on_step'?",
        "Plugin 'typo' (under-test 0) implements unknown hook 'optimiser' (…). Did you mean 'optimizer'?",
        "Plugin 'typo' (under-test 0) implements unknown hook 'zzz' (…). If another package declares it, install it.",
    ]


def test_an_argument_that_the_hook_does_not_have(here: Installed) -> None:
    class Odd(Plugin):
        @hookimpl
        def on_step(self, result: Any) -> None: ...

    here.add(Odd)
    message = refused("odd")
    assert message.startswith("Plugin 'odd' (under-test 0) does not fit the hooks: ")
    assert "on_step" in message
    assert "result" in message


def test_a_plugin_that_fails_when_it_is_made(here: Installed) -> None:
    class Explodes(toys.Bare):
        def __init__(self, config: Any) -> None:
            raise RuntimeError("boom")

    here.add(Explodes)
    with pytest.raises(RuntimeError, match="boom") as caught:
        ask("explodes")
    assert caught.value.__notes__ == ["in plugin 'explodes' (under-test 0), hook __init__"]


# -- rules between values -------------------------------------------------------------------------


def test_problems_of_plugins_are_told_at_once_and_where_the_value_was_written(here: Installed, tmp_path: Path) -> None:
    class Rules(Plugin):
        @section
        class Config:
            a: int = 1
            b: int = 1

        @hookimpl
        def check_config(self, config: Any) -> Iterator[Problem]:
            yield Problem("rules.a", "is wrong.")
            yield Problem("rules.b", "is wrong too.")

    here.add(Rules)
    file = tmp_path / "my.toml"
    file.write_text("plugins = ['rules']\n\n[rules]\na = 5\n", encoding="utf-8")
    assert refused(config=str(file)).splitlines() == [f"{file}:4: rules.a: is wrong.", "rules.b: is wrong too."]


def test_a_plugin_is_given_its_own_section(here: Installed) -> None:
    here.add(Optimizer, name="mine")
    made = ask("mine", set=["mine.lr=0.5"])
    assert made.hooks.plugins["mine"].config == Optimizer.Config(lr=0.5)  # type: ignore[call-arg]


@pytest.mark.usefixtures("here")
def test_hooks_are_not_called_before_there_is_a_job() -> None:
    with pytest.raises(PluginError, match="before the job exists"):
        ask().hooks.build_data("train")

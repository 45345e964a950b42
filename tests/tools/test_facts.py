"""Facts: a tool declares them, Forge's or a package of the test; plugins state them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import toys
from forge_train import ConfigError
from forge_train.base.names import PluginRef
from forge_train_kit.facts import ARCHITECTURES, SAVES, Fact, stated
from forge_train_kit.plugins import find
from forge_train_plugins.models.decoder import Decoder
from forge_train_tools.configuration.known_facts import Facts
from forge_train_tools.facts import EXAMPLE, PER_UNIT, ROUNDS
from forge_train_tools.testing import check
from packages import package

FACTS = """
from forge_train_kit.facts import Fact

COST = Fact("billing.cost", float, "Euros for each hour of a run.")
OWNER = Fact("billing.owner", str, "The one who pays.", literal=True)
"""
WATCH = '''
"""Watches."""

from forge_train import Plugin, hookimpl


class Watch(Plugin):
    """Watches."""

    api = (1, 0)
    facts = {
        "plan.per_unit": True,
        FACT
    }

    @hookimpl
    def on_step(self, step):
        pass
'''
OWN = """import Plugin, hookimpl
from forge_train_kit.facts import Fact

SIZE = Fact("alone.size", int, "Its size.")
"""
Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a tool that declares facts, and a plugin of another package that states one."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def both(fact: str) -> None:
        package(site, "billing", {"facts.py": FACTS}, {"facts": {"billing": "billing.facts"}})
        package(site, "watching", {"plugin.py": WATCH.replace("FACT", fact)}, {"plugins": {"watch": "watching.plugin"}})

    yield both
    for name in [one for one in sys.modules if one.split(".")[0] in ("billing", "watching", "mine")]:
        del sys.modules[name]


def told(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        toys.run(folder / "runs", "watch", steps=1)
    return str(caught.value)


def test_a_third_party_declares_a_fact_for_its_own_tool(tmp_path: Path, install: Install) -> None:
    install('"billing.cost": 2.5, "billing.owner": "us",')
    done = toys.run(tmp_path / "runs", "watch", steps=1)
    from billing.facts import COST, OWNER  # type: ignore[import-not-found]  # installed by the fixture

    assert COST.of(done.plugin("watch")) == 2.5
    assert (OWNER.read(find("watch")), COST.read(find("adamw"))) == ("us", 0.0)
    assert check("watch", folder=tmp_path / "check").passed


def test_its_module_is_imported_only_for_a_plugin_that_states_its_facts(tmp_path: Path, install: Install) -> None:
    install("")
    toys.run(tmp_path / "runs", "watch", steps=1)
    assert "billing.facts" not in sys.modules


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ('"billing.costs": 1.0', r"is declared by no installed tool\. Did you mean 'billing\.cost'\?"),
        ('"biling.cost": 1.0', r"is declared by no installed tool\. Did you mean 'billing\.cost'\?"),
        ('"plan.per_units": True', r"is declared by no installed tool\. Did you mean 'plan\.per_unit'\?"),
        (
            '"zzz.qqq": True',
            r"is declared by no installed tool\. Install the package that declares it, or remove the fact\.",
        ),
        ('"billing.cost": "much"', r"must be float, found 'much'\."),
        ('"billing.cost": True', r"must be float, found True\."),
        ('"memory.saves": "activations"', r"must be tuple\[str, \.\.\.\], found 'activations'\."),
        ('"billing.owner": "u" + "s"', r"is read from the source: write its value out in class Watch, as a literal\."),
    ],
)
def test_a_mistake_names_the_fact_its_line_and_the_nearest_one(
    tmp_path: Path, install: Install, fact: str, said: str
) -> None:
    install(f"{fact},")
    name = fact.split('"')[1]
    expected = rf"Plugin 'watch' \(watching 1\.0\): fact {re.escape(repr(name))} \(.*plugin\.py:13\) {said}"
    assert re.search(expected, told(tmp_path))
    report = check("watch", folder=tmp_path / "check")
    (bad,) = [one for one in report.checks if one.name == "facts are declared"]
    assert bad.status == "fail"
    assert re.search(expected, bad.detail)


def test_facts_that_are_no_mapping(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(re.sub(r"facts = \{.*?\n    \}", 'facts = ["plan.per_unit"]', WATCH, flags=re.DOTALL), "utf-8")
    with pytest.raises(ConfigError, match=r"Plugin 'odd' .*: `facts` \(.*odd\.py:7\) must map names"):
        toys.run(tmp_path / "runs", str(file), steps=1)


def test_two_distributions_declare_the_facts_of_one_tool(tmp_path: Path, install: Install) -> None:
    install('"billing.cost": 1.0,')
    package(tmp_path / "site", "mine", {"facts.py": FACTS}, {"facts": {"billing": "mine.facts"}})
    both = r"declared by billing 1\.0 \(billing\.facts\) and mine 1\.0 \(mine\.facts\): uninstall one"
    assert re.search(both, told(tmp_path))


def test_another_distribution_changes_no_fact_of_forge(tmp_path: Path, install: Install) -> None:
    install('"plan.per_unit": True, "plan.cost": 1.0,')
    facts = FACTS.replace("billing.", "plan.").replace("plan.cost", "plan.per_unit")
    package(tmp_path / "site", "mine", {"facts.py": facts}, {"facts": {"plan": "mine.facts"}})
    said = told(tmp_path)
    assert re.search(r"fact 'plan\.cost' .* is declared by no installed tool", said)
    assert "uninstall" not in said
    assert "must be" not in said, "the fact has the type that the other distribution gives it"


def test_a_module_of_facts_that_fails_to_import(tmp_path: Path, install: Install) -> None:
    install('"mine.cost": 1.0,')
    package(tmp_path / "site", "mine", {"facts.py": "import nowhere_at_all"}, {"facts": {"mine": "mine.facts"}})
    said = told(tmp_path)
    assert "the facts of mine 1.0 failed to import (mine.facts): ModuleNotFoundError" in said


def test_a_plugin_in_a_file_declares_its_own_fact(tmp_path: Path) -> None:
    file = tmp_path / "alone.py"
    own = WATCH.replace("FACT", '"alone.size": 3,').replace(
        "import Plugin, hookimpl\n",
        OWN,
    )
    file.write_text(own, encoding="utf-8")
    done = toys.run(tmp_path / "runs", str(file), steps=1)
    assert stated(type(done.plugin("alone")))["alone.size"] == 3


def test_a_subclass_overrides_facts_one_by_one() -> None:
    class Base:
        facts = {"check.example": ("a=1",), "plan.per_unit": True}

    class Derived(Base):
        facts = {"check.example": (), "verify.rounds": 0.5}

    assert (EXAMPLE.of(Derived), PER_UNIT.of(Derived), ROUNDS.of(Derived)) == ((), True, 0.5)
    assert ROUNDS.of(Base) == 0.0


def test_facts_are_read_from_source_as_they_are_imported() -> None:
    assert ARCHITECTURES.read(find("decoder")) == ARCHITECTURES.of(Decoder)
    assert SAVES.read(find("ac")) == ("activations",)
    assert SAVES.read(find("zero1")) == ("optimizer",)


def test_facts_beside_an_unpacked_table_are_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    stated = '{**{"plan.per_unit": True}, "memory.saves": ("gradients",), **OTHERS}'
    file.write_text(f"class Mine(Plugin):\n    facts = {stated}\n", encoding="utf-8")
    assert SAVES.read(PluginRef("mine", "", "", str(file))) == ("gradients",)


@pytest.mark.parametrize(("kind", "fits", "does_not"), [(int, 1, 1.5), (float, 1, "1"), (bool, True, 1), (str, "", 0)])
def test_types(kind: type, fits: object, does_not: object) -> None:
    fact = Fact("tool.fact", kind, "…")
    assert fact.fits(fits)
    assert not fact.fits(does_not)


def test_every_fact_of_forge_is_declared_under_its_tools_name() -> None:
    names = set(Facts().all())
    assert {"plan.per_unit", "check.example", "verify.rounds", "bench.display"} <= names
    assert {"hf.architectures", "task.weighs_labels", "memory.saves"} <= names

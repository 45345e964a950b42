"""Law 1. Any permutation of `--plugins`, of installation and of registration gives the same composition."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_train import Applied, Phase, Plugin, StepResult, Transform, hookimpl
from forge_train.base.names import PluginRef
from forge_train.compose.compose import compose
from forge_train.mesh.distributed import DistributedContext
from forge_train.mesh.layout import Layout
from forge_train.plugin.calls import Implementations
from forge_train.plugin.job import Job
from forge_train.registry import discovery
from forge_train.registry.setup import Setup
from forge_train.run.control import Control
from forge_train.run.run import Run
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.launching.claim import digest
from forge_train_tools.testing import Installed, installed

pytestmark = [pytest.mark.unit]


def acting(name: str, phase: Phase, *after: str, slot: str = "") -> type[Plugin]:
    """A plugin that transforms the model, and writes down when it is told and entered."""

    def parallelize(self: Any, job: Any) -> Transform:
        return Transform(phase, slot or name.lower(), lambda part: Applied(part, ("head",)), after=after)

    def on_step(self: Any, step: StepResult) -> None:
        step.add("x", 1)

    def on_log(self: Any, record: Any) -> None: ...

    hooks = {function.__name__: hookimpl(function) for function in (parallelize, on_step, on_log)}
    return type(name, (Plugin,), {**hooks, "api": (1, 0)})


class Able(Plugin):
    """Only watches: by its name it would be told before the others, and must be told after them."""

    api = (1, 0)

    @hookimpl
    def on_log(self, record: Any) -> None: ...


PLUGINS = [
    acting("Zulu", Phase.TENSOR),
    acting("Alpha", Phase.SHARD),
    acting("Mike", Phase.ADAPT, "yankee"),
    acting("Yankee", Phase.ADAPT),
    acting("Bravo", Phase.ADAPT, slot="zinc"),  # by its name it would come before the others, by its slot after them
]
WATCHING = ["able"]
NAMES = ["zulu", "alpha", "mike", "yankee", "bravo"]
EXPECTED = ["zulu", "yankee", "mike", "zinc", "alpha"]
QUIET = ("console", "tensorboard")
ORDERS = [tuple(NAMES), tuple(reversed(NAMES)), *random.Random(0).sample(list(itertools.permutations(NAMES)), 16)]


def seen(setup: Setup, folder: Path) -> tuple[Any, ...]:
    """Everything in which an order could show."""
    with DistributedContext.join(Layout(), "cpu") as dist:
        job = Job(setup.config, setup.hooks, Run(folder), dist, Control())
        setup.hooks.bind(job)
        report = compose(job, allocate=False).report
    step = StepResult(1, 1, None, None, 0.0, 0.0, False, (0, 1))  # type: ignore[arg-type]
    setup.hooks.on_step(step)
    return (
        [line["slot"] for line in report],
        report,
        digest(setup.config),
        setup.config.plugins,
        list(setup.hooks.enabled),
        list(step.metrics),
        {hook: setup.hooks.implementers(hook) for hook in ("parallelize", "on_step", "on_log", "optimizer")},
    )


def ask(names: Iterable[str], config: str = "", *more: str) -> Setup:
    sets = ("train.steps=1", "run.device=cpu")
    return resolve(Request(config=config, plugins=(*names, *more), without=QUIET, set=sets))


def same(setups: Iterable[Setup], folder: Path) -> None:
    first, *others = [seen(setup, folder) for setup in setups]
    assert first[0] == EXPECTED
    assert first[-2] == [f"{name}.x" for name in sorted(NAMES)]
    assert first[-1]["on_log"] == [*sorted(NAMES), *WATCHING]
    for other in others:
        assert other == first


@pytest.fixture
def found() -> Iterator[Installed]:
    with installed([*PLUGINS, Able, toys.ToyModel, toys.ToyData]) as plugins:
        yield plugins


@pytest.mark.usefixtures("found")
def test_the_order_of_the_option_plays_no_part(tmp_path: Path) -> None:
    same((ask(order, "", *WATCHING, "toy_model", "toy_data") for order in ORDERS), tmp_path)


@pytest.mark.usefixtures("found")
def test_nor_does_the_order_in_a_file_or_whether_it_is_the_file_or_the_option(tmp_path: Path) -> None:
    def setups() -> Iterator[Setup]:
        file = tmp_path / "my.toml"
        for cut, order in enumerate(ORDERS):
            inside = [*order[: cut % 6], *WATCHING, "toy-model", "toy_data"]
            file.write_text(f"plugins = {inside}\n", encoding="utf-8")
            yield ask(order[cut % 6 :], str(file))

    same(setups(), tmp_path)


def test_nor_does_the_order_of_installation(tmp_path: Path, found: Installed) -> None:
    def setups() -> Iterator[Setup]:
        everything = list(found())
        for seed in range(6):
            shuffled = everything[:]
            random.Random(seed).shuffle(shuffled)
            cut = seed % len(shuffled)

            def one(part: list[PluginRef] = shuffled[:cut]) -> list[PluginRef]:
                return part

            def two(part: list[PluginRef] = shuffled[cut:]) -> list[PluginRef]:
                return part

            discovery.SOURCES[:] = [one, two]  # `found` puts back what was there
            yield ask(NAMES, "", *WATCHING, "toy_model", "toy_data")

    same(setups(), tmp_path)


def test_nor_does_the_order_of_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = list(discovery.entry_points(discovery.GROUP))
    listed = []
    for seed in range(4):
        random.Random(seed).shuffle(points)
        monkeypatch.setattr(discovery, "entry_points", lambda group: list(points))
        listed.append(discovery.discover())
    assert all(one == listed[0] for one in listed)
    assert len(listed[0]) > 10


@pytest.mark.usefixtures("found")
def test_nor_does_the_order_of_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Implementations.of.__func__  # type: ignore[attr-defined]

    def setups() -> Iterator[Setup]:
        for seed in range(6):

            def shuffled(cls: Any, plugins: Any, specs: Any, seed: int = seed) -> Implementations:
                plugins = list(plugins)
                random.Random(seed).shuffle(plugins)
                calls: Implementations = real(cls, plugins, specs)
                return calls

            monkeypatch.setattr(Implementations, "of", classmethod(shuffled))
            yield ask(NAMES, "", *WATCHING, "toy_model", "toy_data")

    same(setups(), tmp_path)


def test_two_orders_train_alike(tmp_path: Path) -> None:
    plugins = [*PLUGINS, toys.Noise, toys.Average]
    first = toys.run(tmp_path, *plugins, steps=3)
    again = toys.run(tmp_path, *reversed(plugins), steps=3)
    assert first.numbers == again.numbers
    assert (first.run / "composition.json").read_bytes() == (again.run / "composition.json").read_bytes()
    assert first.run.name.split("-")[1] == again.run.name.split("-")[1]  # the digest in the id

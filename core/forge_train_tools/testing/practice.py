"""Checks that run a plugin: it is configured, composed, called slot by slot, trained and resumed."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train.base.errors import describe
from forge_train.base.names import canonical
from forge_train.compose.compose import compose, order
from forge_train.loop.describe import to_toml
from forge_train.loop.resume import Stateful
from forge_train.mesh.world import World
from forge_train.plugin import hookspecs
from forge_train.plugin.calls import EnabledPlugin, implemented
from forge_train.plugin.job import Hooks
from forge_train.registry.declared import Specs
from forge_train.registry.discovery import discover
from forge_train.registry.setup import Setup
from forge_train.store.tree import join, split

from ..configuration.request import Request
from ..configuration.setup import resolve
from ..facts import EXAMPLE
from .agreement import agree
from .bench import Bench, Trial, Trials, same
from .conformance import Check, SkippedError, attempt, require
from .contract import device_for
from .runs import Settings, TinyRun, merged, prepared, run_forge
from .trials import TRIALS
from .verifying import Verifier

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 3
WITH = "plugins="
"""Begins the entry of a plugin's `example` that names others to try it with."""
Verify = Callable[[], Verifier]
"""Gives what verifies on two processes; they are started when it is first asked."""


def practise(
    enabled: EnabledPlugin, spec: str, config: Settings | None, sets: tuple[str, ...], folder: Path, verify: Verify
) -> Iterator[Check]:
    """Every check of a plugin at work."""
    example = EXAMPLE.of(enabled.cls)
    beside = [one.removeprefix(WITH) for one in example if one.startswith(WITH)]
    plugins = [spec, *_required(enabled), *(name for names in beside for name in names.split(","))]
    device = device_for(enabled)
    precision = "fp32" if device == "cpu" else "bf16"  # of all that runs on an accelerator only, none needs fp32
    train = {"evaluate_every": 2, "precision": precision}
    settings = merged({"train": train, "run": {"device": device}}, config)
    sets = sets if sets or config else tuple(one for one in example if not one.startswith(WITH))
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))  # what plugins print is no part of the report
        setups: list[Setup] = []

        def configure() -> None:
            context = prepared(plugins, settings, steps=STEPS, sets=sets, folder=folder / "bench")
            setups.append(stack.enter_context(context))

        done = attempt("is configured", configure)
        yield done
        if done.status == "fail":
            return
        bench = Bench(setups[0], enabled, folder / "bench")
        yield attempt("its section goes through TOML", lambda: _round_trip(setups[0], folder))
        yield attempt("order is stable under shuffling", lambda: _shuffled(bench))
        done = attempt("is composed", lambda: _composed(bench))
        yield done
        if done.status == "fail":
            return
        for hook in sorted(implemented(enabled.cls)):
            for name, trial in _trials(bench, hook):
                yield attempt(f"{hook}: {name}", partial(bench.make, trial))
        yield from _trained(enabled, plugins, settings, sets, folder)
        if "parallelize" in implemented(enabled.cls):
            yield from agree(bench, folder, verify())


def _trials(bench: Bench, hook: str) -> Sequence[tuple[str, Trial]]:
    """The trials of a hook: the kernel's, or those that its spec names."""
    spec = bench.setup.hooks.specs[hook]
    if spec.trials:
        trials: Trials = importlib.import_module(spec.trials).TRIALS
        return trials[hook]
    return TRIALS.get(hook, ())


def _required(enabled: EnabledPlugin) -> list[str]:
    """The plugins that it requires by name; slots are filled by defaults."""
    known, specs = {found.name for found in discover()}, Specs([])
    return [name for name in enabled.cls.requires if canonical(name) in known and not specs.find(canonical(name))]


def _round_trip(setup: Setup, folder: Path) -> None:
    file = folder / "resolved.toml"
    file.write_text(to_toml(setup.config, setup.hooks), encoding="utf-8")
    again = resolve(Request(config=str(file)), world=World.here().size).config
    before, after = setup.config.values(), again.values()
    before["run.name"] = after["run.name"]
    changed = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    require(not changed, f"{', '.join(changed)}: other values after a round trip through TOML")


def _shuffled(bench: Bench) -> None:
    hooks = bench.setup.hooks
    pairs = [(hooks.enabled[name], plugin) for name, plugin in hooks.plugins.items()]
    expected = _order(bench, hooks)
    for shift in range(1, len(pairs)):
        other = Hooks([*pairs[shift:], *pairs[:shift]][::-1], hooks.defaults, hooks.specs)
        other.bind(bench.job)
        require(_order(bench, other) == expected, "hooks or transforms come in another order when plugins do")


def _order(bench: Bench, hooks: Hooks) -> list[Any]:
    called = hooks.call(hookspecs.parallelize, {"job": bench.job})
    transforms = [(plugin, one.phase, one.slot) for plugin, one in order(called)]
    return [*transforms, *((hook, hooks.implementers(hook)) for hook in hooks.specs)]


def _composed(bench: Bench) -> str:
    bench.job.run.dir.mkdir(parents=True, exist_ok=True)
    first, second = compose(bench.job, allocate=False), compose(bench.job)
    require(first.report == second.report, "two compositions of one job differ")
    own = [entry for entry in second.report if entry["plugin"] == bench.enabled.name]
    if not own and "parallelize" in implemented(bench.enabled.cls):
        raise SkippedError("idle in one process: its transforms were not tried")
    return "; ".join(f"{entry['phase']} {entry['slot']} matched {len(entry['matched'])}" for entry in own)


def _trained(
    enabled: EnabledPlugin, plugins: list[str], settings: Settings, sets: tuple[str, ...], folder: Path
) -> Iterator[Check]:
    """Three trainings: one in one go, one more like it, and one that is stopped and resumed."""

    def run(name: str, stop_at: int | None = None) -> TinyRun:
        return run_forge(plugins, settings, steps=STEPS, sets=sets, name=name, stop_at=stop_at, folder=folder / "runs")

    runs: list[TinyRun] = []

    def trains() -> str:
        with _warnings() as warnings:
            runs.append(run("whole"))
        lost = [hook for hook in implemented(enabled.cls) if enabled.name not in runs[0].job.hooks.implementers(hook)]
        require(not lost, "; ".join(warnings) or f"{', '.join(lost)} failed")
        return f"loss {runs[0].losses[0]:.3f} → {runs[0].losses[-1]:.3f}"

    done = attempt("trains three steps", trains)
    yield done
    if done.status == "fail":
        return

    def repeats() -> None:
        other = run("again")
        require(other.numbers == runs[0].numbers, f"two equal trainings differ: {_difference(runs[0], other)}")

    yield attempt("trains alike every time", repeats)

    def resumes() -> None:
        run("stopped", stop_at=2)
        other = run("stopped")
        require(other.numbers == runs[0].numbers, f"after a resume {_difference(runs[0], other)}")
        require(same(other.model.state_dict(), runs[0].model.state_dict()), "weights differ after a resume")
        if isinstance(runs[0].plugin(enabled.name), Stateful):
            before, after = (one.plugin(enabled.name).state_dict() for one in (runs[0], other))
            require(same(before, after), "its own state differs after a resume")

    yield attempt("resumes exactly", resumes)

    def goes_on() -> None:
        seldom = merged(settings, {"log": {"every": STEPS}})
        whole, _, other = (
            run_forge(plugins, seldom, steps=STEPS, sets=sets, name=name, stop_at=stop, folder=folder / "runs")
            for name, stop in (("seldom", None), ("between", 2), ("between", None))
        )
        require(other.numbers == whole.numbers, f"resumed between two logged steps, {_difference(whole, other)}")

    if "metrics" in implemented(enabled.cls):
        yield attempt("its metrics are resumed between logged steps", goes_on)
    if isinstance(runs[0].plugin(enabled.name), Stateful):
        yield attempt("its state goes round", lambda: _state(enabled, runs[0]))


def _state(enabled: EnabledPlugin, run: TinyRun) -> None:
    plugin = run.plugin(enabled.name)
    tensors: dict[str, Tensor] = {}
    rest = split(plugin.state_dict(), "state", tensors)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    plugin.load_state_dict(join(rest, kept))
    again: dict[str, Tensor] = {}
    require(
        split(plugin.state_dict(), "state", again) == rest and same(again, kept),
        "load_state_dict(state_dict()) changes the state",
    )


def _difference(one: TinyRun, other: TinyRun) -> str:
    """The first value that two trainings disagree about."""
    for a, b in zip(one.numbers, other.numbers, strict=False):
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                return f"{key} of step {a['step']} is {b.get(key)!r} instead of {a.get(key)!r}"
    return f"{len(other.numbers)} steps were logged instead of {len(one.numbers)}"


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Warnings of core while the block lasts, among them those about plugins whose failure does not end a run."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("forge_train")
    propagates, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield found
    except Exception as error:
        found.append(describe(error))
        raise
    finally:
        log.removeHandler(handler)
        log.propagate = propagates

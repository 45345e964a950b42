"""How hooks are called: in what order, who is blamed, whose failure counts, and what slots and chains accept."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy
import pytest
import torch
from torch import Tensor, nn

import toys
from forge_train import (
    Applied,
    Batch,
    BatchPhase,
    ConfigError,
    LogRecord,
    Phase,
    Plugin,
    PluginError,
    PrepareBatch,
    PrepareStep,
    Transform,
    hookimpl,
)
from forge_train.base.names import PluginRef
from forge_train.contract.events import Evaluation, Finished, StepResult
from forge_train.plugin import hookspecs as kernel
from forge_train.plugin.calls import EnabledPlugin, Implementations, implemented
from forge_train.plugin.hookspecs import SPECS
from forge_train.plugin.job import Hooks
from forge_train.registry.declared import Specs
from forge_train_kit import hookspecs
from forge_train_kit.blame import note_plugin
from forge_train_kit.contract import ExtraModel, InitialWeights
from forge_train_kit.layers import Layer
from forge_train_kit.return_checks import Returns

ALL = Specs([])
"""Forge's own hooks."""
pytestmark = pytest.mark.unit
_P = TypeVar("_P", bound=Plugin)


def hooks(*plugins: Plugin, defaults: dict[str, str] | None = None) -> Hooks:
    """Instances behind the facade; each is named after its class."""
    pairs = [
        (
            EnabledPlugin(
                PluginRef(type(plugin).__name__.lower(), "dist", "1", f"m:{type(plugin).__name__}"),
                type(plugin),
                specs=ALL,
            ),
            plugin,
        )
        for plugin in plugins
    ]
    made = Hooks(pairs, defaults or {}, ALL, Returns())
    made._job = SimpleNamespace(hooks=made)  # type: ignore[assignment]
    return made


def make(cls: type[_P]) -> _P:
    return cls(cls.Config())


class Teller(Plugin):
    """Writes down what it is told."""

    def __init__(self, config: Any, seen: list[str]) -> None:
        super().__init__(config)
        self.seen = seen

    @hookimpl
    def on_step(self, step: Any) -> None:
        self.seen.append(type(self).__name__)


class Teller_(Plugin):
    """Its code lies here."""

    @hookimpl
    def on_step(self, step: Any) -> None: ...


def result(**more: Any) -> StepResult:
    return StepResult(1, 2, None, None, 0.1, 0.2, False, (0, 4), **more)  # type: ignore[arg-type]


# -- order and arguments --------------------------------------------------------------------------


def test_every_order_of_registration_calls_in_the_order_of_names() -> None:
    classes = [type(name, (Teller,), {}) for name in "BCAD"]
    for order in itertools.permutations(classes):
        seen: list[str] = []
        hooks(*(cls(None, seen) for cls in order)).on_step(result())
        assert seen == ["A", "B", "C", "D"]


def test_a_plugin_names_the_arguments_it_wants() -> None:
    class None_(Plugin):
        @hookimpl
        def on_start(self) -> None:
            seen.append(())

    class Some(Plugin):
        @hookimpl
        def on_start(self, optimizer: Any, job: Any) -> None:
            seen.append((optimizer, job))

    class Defaults(Plugin):
        @hookimpl
        def on_start(self, model: Any, extra: int = 3, job: Any = "a default") -> None:
            seen.append((model, extra, job))

    class Static(Plugin):
        @staticmethod
        @hookimpl
        def on_start(model: Any) -> None:
            seen.append((model,))

    seen: list[Any] = []
    made = hooks(*map(make, (Some, None_, Defaults, Static)))
    made.on_start("model", "optimizer")  # type: ignore[arg-type]
    assert seen == [("model", 3, made.job), (), ("optimizer", made.job), ("model",)]


def test_properties_are_not_asked_while_hooks_are_looked_for() -> None:
    class Lazy(Plugin):
        @property
        def expensive(self) -> Any:
            raise AssertionError

        @hookimpl
        def on_step(self, step: Any) -> None: ...

    assert implemented(Lazy) == {"on_step"}
    hooks(make(Lazy)).on_step(result())


def test_a_metric_is_put_under_the_name_of_the_plugin_that_is_told() -> None:
    class One(Plugin):
        @hookimpl
        def on_step(self, step: StepResult) -> None:
            step.add("x", 1)

    class Two(Plugin):
        @hookimpl
        def on_step(self, step: StepResult) -> None:
            step.add("x", 2)
            step.add("slow", 0.5, timing=True)

    step = result()
    hooks(make(Two), make(One)).on_step(step)
    assert step.metrics == {"one.x": 1, "two.x": 2, "two.slow": 0.5}
    assert step.timings == {"two.slow"}


def test_a_metric_named_like_its_plugin_is_logged_by_that_name_and_may_be_unknown(tmp_path: Path) -> None:
    class Balance(Plugin):
        @hookimpl
        def on_step(self, step: StepResult) -> None:
            step.add("balance", 0.5 if step.step == 1 else None)

    run = toys.run(tmp_path, Balance, steps=2)
    assert [line["balance"] for line in run.metrics] == [0.5, None]


def test_a_plugin_does_not_replace_the_run_s_own_metrics() -> None:
    class Loss(Plugin):
        @hookimpl
        def on_step(self, step: StepResult) -> None:
            step.add("loss", 0.0)

    with pytest.raises(PluginError, match="metric 'loss' is the run's own; give yours another name"):
        hooks(make(Loss)).on_step(result())


def test_a_metric_may_be_a_number_of_numpy_or_a_tensor(tmp_path: Path) -> None:
    class Odd(Plugin):
        @hookimpl
        def on_step(self, step: StepResult) -> None:
            step.add("numpy", numpy.float32(0.5))
            step.add("tensor", torch.tensor(2))

        @hookimpl
        def on_log(self, record: LogRecord | Evaluation) -> None:
            if isinstance(record, Evaluation):
                record.add("numpy", numpy.int64(3))
                record.add("tensor", torch.tensor(0.25))

    run = toys.run(tmp_path, Odd, steps=1, config={"train.evaluate_every": 1, "train.evaluate_batches": 1})
    assert [(line["odd.numpy"], line["odd.tensor"]) for line in run.metrics] == [(0.5, 2)]
    (found,) = [event["metrics"] for event in run.events if event["event"] == "evaluation"]
    assert (found["odd.numpy"], found["odd.tensor"]) == (3, 0.25)


# -- blame ----------------------------------------------------------------------------------------


def test_a_failure_names_plugin_distribution_and_hook_and_keeps_its_traceback() -> None:
    class Bad(Plugin):
        @hookimpl
        def on_step(self, step: Any) -> None:
            self.deep()

        def deep(self) -> None:
            raise KeyError("what happened")

    with pytest.raises(KeyError) as caught:
        hooks(make(Bad)).on_step(result())
    assert caught.value.__notes__ == ["in plugin 'bad' (dist 1), hook on_step"]
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "deep"


def test_what_a_slot_gave_is_blamed_by_where_its_code_lies() -> None:
    def enabled(name: str, module: str) -> EnabledPlugin:
        return EnabledPlugin(PluginRef(name, "dist", "1", f"{module}:X"), Plugin, specs=ALL)

    def failure(module: str, *inside: str) -> Exception:
        """An error that passed through functions of these modules, the innermost first."""
        code = "def call(f):\n    f()\n"
        function: Callable[[], object] = lambda: int("x")  # noqa: E731
        for name in (module, *inside):
            space: dict[str, Any] = {"__name__": name}
            exec(code, space)
            function = (lambda f, g: lambda: g(f))(function, space["call"])
        try:
            function()
        except ValueError as error:
            return error
        raise AssertionError

    plugins = [enabled("a", "pkg.a"), enabled("b", "pkg.b"), enabled("c", "lonely")]
    for module, expected in (
        ("pkg.a", "in plugin 'a' (dist 1) (call)"),
        ("pkg._a", "in plugin 'a' (dist 1) (call)"),
        ("pkg._a.deep.down", "in plugin 'a' (dist 1) (call)"),
        ("_lonely", "in plugin 'c' (dist 1) (call)"),
        ("torch.nn", None),
        ("pkg.abc", None),
    ):
        error = failure(module, "somewhere.else")
        note_plugin(error, plugins, SPECS)
        assert getattr(error, "__notes__", [None]) == [expected]
    error = failure("pkg.a", "pkg.b")
    note_plugin(error, plugins, SPECS)
    note_plugin(error, plugins, SPECS)
    assert error.__notes__ == ["in plugin 'a' (dist 1) (call)"]


def test_words_for_a_hook_know_its_names_also_as_a_copy() -> None:
    whose = hooks(make(Teller_)).whose("on_step", "teller_")
    for one in (whose, copy.deepcopy(whose), pickle.loads(pickle.dumps(whose))):
        assert one.startswith("Plugin 'teller_' (dist 1), hook on_step (")
        assert (one.plugin, one.hook) == ("teller_", "on_step")


def test_the_owner_of_what_a_plugin_made() -> None:
    made = hooks(make(Teller_))
    assert made.owner(Mixer("x")) == "plugin 'teller_' (dist 1)"
    assert made.owner(nn.Identity()) == ""


def test_an_error_of_forge_itself_passes_as_it_is() -> None:
    class Bad(Plugin):
        @hookimpl
        def on_log(self, record: Any) -> None:
            raise ConfigError("a clear message")

    with pytest.raises(ConfigError) as caught:
        hooks(make(Bad)).on_log(LogRecord(1, 2, {}))
    assert not hasattr(caught.value, "__notes__")


# -- observers ------------------------------------------------------------------------------------


class Watch(Plugin):
    """Fails when it is told of a line of metrics."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.told: list[str] = []

    @hookimpl
    def on_log(self, record: Any) -> None:
        self.told.append("log")
        raise OSError("disk full\nmore")

    @hookimpl
    def on_end(self, finished: Any) -> None:
        self.told.append("end")


class Act(Watch):
    """The same, but it does more than watch."""

    @hookimpl
    def on_step(self, step: Any) -> None: ...


def test_an_observer_that_fails_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class ZOther(Watch):
        @hookimpl
        def on_log(self, record: Any) -> None: ...

    bad, other = make(Watch), make(ZOther)
    made = hooks(bad, other)
    with caplog.at_level(logging.WARNING):
        made.on_log(LogRecord(1, 2, {}))
    warning, traceback_record = caplog.records
    expected = "Plugin 'watch' (dist 1) failed in on_log and is left out from here on: OSError: disk full ("
    assert warning.getMessage().startswith(expected)
    assert f"test_calls.py:{Watch.on_log.__code__.co_firstlineno + 3})" in warning.getMessage()
    assert warning.exc_info is None
    assert not traceback_record.screen  # type: ignore[attr-defined]
    assert traceback_record.exc_info
    made.on_log(LogRecord(2, 2, {}))
    made.on_end(Finished("done", 2, None, 0, Path()))
    assert bad.told == ["log"]
    assert other.told == ["end"]
    assert len(caplog.records) == 2


def test_the_traceback_of_an_observers_failure_is_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = toys.run(tmp_path, Watch, steps=1)
    log = (run.run / "log" / "rank-0.log").read_text(encoding="utf-8")
    assert "Plugin 'watch' (under-test 0) failed in on_log and is left out from here on: OSError: disk full (" in log
    assert 'raise OSError("disk full' in log
    assert "Traceback" not in capsys.readouterr().err


def test_any_other_plugin_that_fails_stops_the_run() -> None:
    with pytest.raises(OSError, match="disk full") as caught:
        hooks(make(Act)).on_log(LogRecord(1, 2, {}))
    assert caught.value.__notes__ == ["in plugin 'act' (dist 1), hook on_log"]


def test_a_signal_and_the_end_of_the_interpreter_are_no_failures_of_an_observer() -> None:
    class Stopped(Plugin):
        @hookimpl
        def on_log(self, record: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hooks(make(Stopped)).on_log(LogRecord(1, 2, {}))


def test_who_is_an_observer() -> None:
    found = PluginRef("x", "", "", "")
    assert EnabledPlugin(found, Watch, specs=ALL).observer
    assert not EnabledPlugin(found, Act, specs=ALL).observer
    for hook in [name for name, spec in SPECS.items() if spec.observes]:
        assert SPECS[hook].kind == "event" or hook == "metrics"


def test_an_observer_can_be_muted_and_nobody_else() -> None:
    made = hooks(make(Watch), make(Act))
    made.mute("watch")
    made.mute("absent")
    assert made.implementers("on_log") == ["act"]
    with pytest.raises(ConfigError, match="does more than watch the run"):
        made.mute("act")


# -- tracing --------------------------------------------------------------------------------------


def test_hooks_are_traced_on_demand(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.WARNING):
        hooks(Teller(None, [])).on_step(result())
        assert not caplog.records
        monkeypatch.setenv("FORGE_TRACE_HOOKS", "1")
        hooks(Teller(None, [])).on_step(result())
    (record,) = caplog.records
    assert record.getMessage().startswith("hook on_step → teller (")
    assert record.getMessage().endswith(" ms)")


# -- slots ----------------------------------------------------------------------------------------


class Gives(Plugin):
    """Answers every slot and chain with what its class says."""

    answer: Any = None

    @hookimpl
    def optimizer(self, model: Any, job: Any) -> Any:
        return self.answer

    @hookimpl
    def attention(self, layer: Layer, job: Any) -> Any:
        return self.answer(layer) if isfunction(self.answer) else self.answer


class Mixer(nn.Module):
    """A token mixer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Any, *, position_ids: Any = None, document_ids: Any = None, cache: Any = None) -> Any:
        return x


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)])


def giving(name: str, answer: Any) -> Plugin:
    return make(type(name, (Gives,), {"answer": staticmethod(answer) if isfunction(answer) else answer}))


def test_a_slot_is_asked_of_its_one_provider() -> None:
    optimizer = sgd()
    assert kernel.optimizer("model", hooks(giving("A", optimizer)).job) is optimizer
    with pytest.raises(PluginError, match=r"Plugin 'a' \(dist 1\), hook optimizer \(.*\): expected .*, found None\."):
        kernel.optimizer("model", hooks(giving("A", None)).job)
    with pytest.raises(ConfigError, match=r"Plugins 'a' \(dist 1\) and 'b' \(dist 1\) both fill the slot 'optimizer'"):
        kernel.optimizer("model", hooks(giving("B", sgd()), giving("A", sgd())).job)
    with pytest.raises(ConfigError, match="No enabled plugin fills the slot 'lr_schedule'"):
        hooks().lr_schedule("optimizer")  # type: ignore[arg-type]


def test_optional_slots_may_stay_empty() -> None:
    assert hooks().provider("loss_scale") is None
    assert hooks().provider("tokenizer") is None
    assert {name for name, spec in SPECS.items() if spec.optional and spec.kind != "slot"} == set()
    with pytest.raises(ConfigError, match="fills the slot 'tokenizer'"):
        hookspecs.tokenizer(hooks().job)


# -- chains ---------------------------------------------------------------------------------------


def layer(index: int = 0) -> Layer:
    return Layer(index=index, num_layers=2, dim=8, heads=2, kv_heads=2, head_dim=4, ffn_dim=16)


def test_a_chain_takes_the_one_claim_else_the_default() -> None:
    def odd(layer: Layer) -> Mixer | None:
        return Mixer("claimed") if layer.index % 2 else None

    made = hooks(giving("Zdefault", Mixer("default")), giving("Claims", odd), defaults={"attention": "zdefault"})
    assert [hookspecs.attention(layer(index), made.job).name for index in range(3)] == ["default", "claimed", "default"]  # type: ignore[attr-defined]
    mixer = Mixer("its own")
    assert hookspecs.attention(layer(), hooks(giving("Only", mixer)).job) is mixer


def test_two_claims_for_a_layer_are_an_error_that_names_both() -> None:
    made = hooks(*(giving(name, Mixer(name)) for name in "ABC"), defaults={"attention": "c"})
    with pytest.raises(ConfigError, match="Plugins 'a' and 'b' both build attention for layer 1"):
        hookspecs.attention(layer(1), made.job)
    with pytest.raises(ConfigError, match="No enabled plugin builds attention for layer 1"):
        hookspecs.attention(layer(1), hooks(giving("A", None)).job)


# -- phases, steps, spans, questions --------------------------------------------------------------


def test_parallelize_takes_one_several_or_none() -> None:
    def transform(slot: str) -> Transform:
        return Transform(Phase.TENSOR, slot, Applied)

    def plugin(name: str, answer: Any) -> Plugin:
        return make(type(name, (Plugin,), {"parallelize": hookimpl(lambda self, job: answer)}))

    one, two, three = transform("one"), transform("two"), transform("three")
    made = hooks(plugin("C", None), plugin("B", (two, three)), plugin("A", one), plugin("D", []))
    assert kernel.parallelize(made.job) == [("a", one), ("b", two), ("b", three)]
    with pytest.raises(
        PluginError, match=r"hook parallelize \(.*\): expected a Transform, a list of Transform or None, found a list"
    ):
        kernel.parallelize(hooks(plugin("A", ["x"])).job)


def test_batches_are_prepared_phase_by_phase_and_in_a_phase_by_one_plugin_after_the_other() -> None:
    def plugin(name: str, *steps: PrepareBatch | PrepareStep) -> Plugin:
        return make(type(name, (Plugin,), {"prepare_batch": hookimpl(lambda self, job: steps or None)}))

    def times(k: int, phase: BatchPhase = BatchPhase.MASK) -> PrepareBatch:
        return PrepareBatch(phase, lambda batch: replace(batch, inputs=batch.inputs * k + 1))

    def prepared(made: Hooks) -> Tensor:
        made._job = SimpleNamespace(dist=SimpleNamespace(data_rank=0, data_ranks=1))  # type: ignore[assignment]
        return made.prepare_batch()([Batch(ones, ones)])[0].inputs

    made = hooks(plugin("B", times(10)), plugin("A", times(2)), plugin("C"))
    ones = torch.ones(1, 1, dtype=torch.int64)
    assert prepared(made).item() == (1 * 2 + 1) * 10 + 1
    made = hooks(plugin("A", times(10, BatchPhase.SLICE), times(3)), plugin("B", times(2, BatchPhase.MAKE)))
    assert prepared(made).item() == ((1 * 2 + 1) * 3 + 1) * 10 + 1
    assert prepared(hooks()) is ones
    with pytest.raises(
        PluginError, match=r"hook prepare_batch \(.*\): the function \(.*\) must return a Batch, found None\."
    ):
        prepared(hooks(plugin("A", PrepareBatch(BatchPhase.MAKE, lambda batch: None))))
    for wrong in (
        PrepareStep(lambda batches: [one.slice("seq", (0, 1)) for one in batches]),  # type: ignore[arg-type]
        PrepareBatch(BatchPhase.MASK, lambda batch: batch.slice("seq", (0, 1))),  # type: ignore[arg-type]
    ):
        with pytest.raises(PluginError, match=r"^Plugin 'a' .* prepare_batch \(.*\): A batch is cut along") as caught:
            prepared(hooks(plugin("A", wrong)))
        assert (caught.value.where.plugin, caught.value.where.hook) == ("a", "prepare_batch")
    seen: list[int] = []

    def see(batches: Sequence[Batch]) -> Sequence[Batch]:
        seen.append(int(batches[0].inputs.item()))
        return batches

    look = PrepareStep(see)
    halve = PrepareBatch(BatchPhase.SLICE, lambda batch: batch.map(lambda tensor: tensor // 2))
    assert prepared(hooks(plugin("A", halve, look), plugin("B", times(6)))).item() == 3
    assert seen == [7], "between masking and slicing"
    for given, says in (
        (None, r"the function \(.*\) must return a list of Batch, found None\."),
        ([None], r"must return a list of Batch, found None\."),
        ([Batch(ones, ones, sample_ids=torch.ones(2))], r"found one that does not fit together: 'sample_ids' is"),
        ([], r"a PrepareStep must return as many batches as it is given, 1; found 0\."),
    ):
        with pytest.raises(PluginError, match=rf"hook prepare_batch .*{says}"):
            prepared(hooks(plugin("A", PrepareStep(lambda batches, given=given: given))))  # type: ignore[misc]


def test_sequences_keep_the_numbers_that_a_loader_gives_or_are_counted() -> None:
    def doubled(batch: Batch) -> Batch:
        inputs, labels = (one.repeat_interleave(2, 0) for one in (batch.inputs, batch.labels))
        return replace(batch, inputs=inputs, labels=labels, sample_ids=None)

    ones = torch.ones(2, 1, dtype=torch.int64)
    plain = [Batch(ones, ones), Batch(ones, ones)]
    numbered = [replace(one, sample_ids=torch.tensor(ids)) for one, ids in zip(plain, ((9, 7), (6, 8)), strict=True)]
    change = hookimpl(lambda self, job: PrepareBatch(BatchPhase.MAKE, doubled))
    twice = hooks(make(type("A", (Plugin,), {"prepare_batch": change})))
    for made, given, wanted in (
        (hooks(), plain, [[6, 7], [8, 9]]),
        (hooks(), numbered, [[9, 7], [6, 8]]),
        (twice, plain, [[12, 13, 14, 15], [16, 17, 18, 19]]),
        (twice, numbered, [[18, 19, 14, 15], [12, 13, 16, 17]]),
    ):
        made._job = SimpleNamespace(dist=SimpleNamespace(data_rank=0, data_ranks=1))  # type: ignore[assignment]
        assert [one.tensors()["sample_ids"].tolist() for one in made.prepare_batch()(given, 6)] == wanted


def test_spans_nest_in_the_order_of_names() -> None:
    seen: list[str] = []

    def plugin(name: str, wanted: str) -> Plugin:
        @contextmanager
        def inside() -> Iterator[None]:
            seen.append(f"+{name}")
            try:
                yield
            finally:
                seen.append(f"-{name}")

        return make(type(name, (Plugin,), {"around": hookimpl(lambda self, span: inside if span == wanted else None)}))

    made = hooks(plugin("B", "step"), plugin("A", "step"), plugin("C", "save"))
    around = kernel.around("step", made.job)
    for _ in range(2):
        with around():
            seen.append("|")
        with pytest.raises(ZeroDivisionError), around():
            raise ZeroDivisionError
    assert seen == ["+A", "+B", "|", "-B", "-A", "+A", "+B", "-B", "-A"] * 2
    seen.clear()
    with kernel.around("evaluate", made.job)():
        assert not seen


def test_questions_collect_or_have_one_answer() -> None:
    def plugin(name: str, answer: Any) -> Plugin:
        return make(type(name, (Plugin,), {"extra_models": hookimpl(lambda self, job: answer)}))

    def only(*plugins: Plugin) -> Any:
        made = hooks(*plugins)
        return made.only(ALL["extra_models"], {"job": made.job})

    models = [ExtraModel("teacher")]
    assert only(plugin("A", None), plugin("B", models)) is models
    assert only(plugin("A", None)) is None
    with pytest.raises(ConfigError, match="Plugins 'a' and 'b' both answer extra_models"):
        only(plugin("A", models), plugin("B", models))


def test_a_thing_that_no_plugin_need_claim(tmp_path: Path) -> None:
    def plugin(name: str, suffix: str) -> Plugin:
        def answer(self: Any, path: Path) -> InitialWeights | None:
            return InitialWeights((name,)) if path.suffix == suffix else None

        return make(type(name, (Plugin,), {"initial_weights": hookimpl(answer)}))

    made = hooks(plugin("A", ".a"), plugin("B", ".b"), plugin("C", ".b"))
    model: Any = None
    assert hookspecs.initial_weights(tmp_path / "x.a", model, made.job) == InitialWeights(("A",))
    assert hookspecs.initial_weights(tmp_path / "x.c", model, made.job) is None
    with pytest.raises(ConfigError, match=r"Plugins 'b' and 'c' both build initial_weights for path .*x\.b"):
        hookspecs.initial_weights(tmp_path / "x.b", model, made.job)


# -- hooks of every kind are found whatever else a plugin is ---------------------------------------


def test_a_shuffled_set_of_many_plugins_is_the_same_facade() -> None:
    classes: list[type[Teller]] = [type(f"P{i}", (Teller,), {}) for i in range(6)]
    orders = []
    for seed in range(5):
        shuffled = classes[:]
        random.Random(seed).shuffle(shuffled)
        calls = Implementations.of(
            [
                (EnabledPlugin(PluginRef(c.__name__.lower(), "d", "1", "m:c"), c, specs=SPECS), c(None, []))
                for c in shuffled
            ],
            SPECS,
        )
        orders.append([owner.name for owner in calls.owners("on_step")])
    assert orders == [[f"p{i}" for i in range(6)]] * 5


def test_a_failure_inside_a_run_is_named_in_the_log_and_kept(tmp_path: Path) -> None:
    class Bad(Plugin):
        @hookimpl
        def prepare_batch(self, job: Any) -> Any:
            return PrepareBatch(BatchPhase.MAKE, self.fail)

        def fail(self, batch: Batch) -> Batch:
            raise LookupError("no batch like this")

    with pytest.raises(LookupError) as caught:
        toys.run(tmp_path, Bad, name="x")
    assert caught.value.__notes__ == ["in plugin 'bad' (under-test 0), hook prepare_batch"]
    log = (tmp_path / "x" / "log" / "rank-0.log").read_text(encoding="utf-8")
    assert "LookupError: no batch like this" in log
    assert "in fail" in log
    assert "in plugin 'bad' (under-test 0), hook prepare_batch" in log

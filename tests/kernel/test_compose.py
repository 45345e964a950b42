"""Composition: the mandated order, what each transform is held to, several parts, what the engine is told to call."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import toys
from forge_train import Applied, ConfigError, Init, Phase, Plugin, PluginError, Transform, hookimpl
from forge_train.compose.compose import Composition, compose, order
from forge_train.compose.coverage import needed
from forge_train.mesh.axes import CONFIGURED
from forge_train.mesh.layout import Layout
from forge_train.registry.discovery import discover
from forge_train_kit.covering import covers
from forge_train_kit.invariants import check_added
from forge_train_kit.modules import swap
from forge_train_kit.specialisation import Specialisation
from forge_train_tools.testing.environment import installed

pytestmark = pytest.mark.unit


def plugin(name: str, phase: Phase, apply: Callable[[nn.Module], Any], *, slot: str = "", **more: Any) -> type[Plugin]:
    """A plugin with one transform."""
    transform = Transform(phase, slot or name.lower(), apply, **more)
    return type(name, (Plugin,), {"api": (1, 0), "parallelize": hookimpl(lambda self, job: transform)})


def touch(part: nn.Module) -> Applied:
    """Changes nothing, and says it matched."""
    return Applied(part, ("head",))


def composed(folder: Path, *plugins: Any, allocate: bool = True, **more: Any) -> Composition:
    with toys.job(*plugins, folder=folder, **more) as job:
        return compose(job, allocate=allocate)


def complaint(folder: Path, error: type[Exception], *plugins: Any, **more: Any) -> str:
    with pytest.raises(error) as caught:
        composed(folder, *plugins, allocate=False, **more)
    return str(caught.value)


# -- order ----------------------------------------------------------------------------------------


def named(*transforms: Transform) -> list[tuple[str, Transform]]:
    return [(f"plugin-{transform.slot}", transform) for transform in transforms]


def slots(*transforms: Transform) -> list[str]:
    return [transform.slot for _, transform in order(named(*transforms))]


def test_phases_come_in_the_mandated_order() -> None:
    assert [phase.name for phase in Phase] == (
        ["PIPELINE", "TENSOR", "CONTEXT", "EXPERT", "ADAPT", "FLOAT8", "RECOMPUTE", "COMPILE", "SHARD"]
    )
    every = [Transform(phase, f"{99 - phase}", touch) for phase in Phase]
    for shuffled in (every, every[::-1], every[4:] + every[:4]):
        assert slots(*shuffled) == [f"{99 - phase}" for phase in Phase]


def test_within_a_phase_after_comes_before_the_name_of_the_slot() -> None:
    every = [
        Transform(Phase.ADAPT, "c", touch),
        Transform(Phase.ADAPT, "a", touch, after=("d", "not there")),
        Transform(Phase.ADAPT, "b", touch, after=("a",)),
        Transform(Phase.ADAPT, "d", touch, after=("e-of-an-earlier-phase",)),
        Transform(Phase.TENSOR, "e-of-an-earlier-phase", touch),
    ]
    for permutation in itertools.permutations(every):
        assert slots(*permutation) == ["e-of-an-earlier-phase", "c", "d", "a", "b"]


@pytest.mark.parametrize(
    ("transforms", "says"),
    [
        (
            [Transform(Phase.ADAPT, "a", touch, after=("b",)), Transform(Phase.ADAPT, "b", touch, after=("a",))],
            "The `after` of slots 'a', 'b' form a cycle.",
        ),
        ([Transform(Phase.ADAPT, "a", touch, after=("a",))], "The `after` of slots 'a' form a cycle."),
        (
            [Transform(Phase.TENSOR, "a", touch, after=("b",)), Transform(Phase.SHARD, "b", touch)],
            "Plugin 'plugin-a': 'a' asks to come after 'b', which is of the later phase SHARD. `after` orders within a",
        ),
        (
            [Transform(Phase.TENSOR, "a", touch, requires=("b",))],
            "Plugin 'plugin-a' requires the slot 'b', which no enabled plugin fills.",
        ),
        (
            [Transform(Phase.TENSOR, "a", touch, conflicts=("b",)), Transform(Phase.SHARD, "b", touch)],
            "Plugins 'plugin-a' and 'plugin-b' can't be composed: 'b' conflicts.",
        ),
    ],
)
def test_orders_that_can_not_be(transforms: list[Transform], says: str) -> None:
    for permutation in itertools.permutations(transforms):
        with pytest.raises(ConfigError) as caught:
            order(named(*permutation))
        assert says in str(caught.value)


def test_one_slot_has_one_transform() -> None:
    both = [("b", Transform(Phase.TENSOR, "tp", touch)), ("a", Transform(Phase.SHARD, "tp", touch))]
    for pair in (both, both[::-1]):
        with pytest.raises(ConfigError, match="Plugins 'a' and 'b' both fill the slot 'tp'; disable one"):
            order(pair)


def test_a_fallback_gives_way_only_to_what_covers_all_it_covers() -> None:
    fallback = Transform(Phase.FLOAT8, "fallback", touch, covers=("tp", "precision"), fallback=True)
    other = Transform(Phase.FLOAT8, "other", touch, covers=("tp",), fallback=True)
    half = Transform(Phase.TENSOR, "half", touch, covers=("tp",))
    whole = Transform(Phase.SHARD, "whole", touch, covers=("precision", "tp", "dp_shard"))
    for transforms, left in (
        ([fallback, other], ["fallback", "other"]),
        ([fallback, other, half], ["fallback", "half"]),
        ([fallback, half, whole], ["half", "whole"]),
    ):
        assert [one.slot for _, one in needed(named(*transforms))] == left


def test_a_phase_is_a_phase() -> None:
    with pytest.raises(PluginError, match="Transform 'a': expected a Phase, found 60"):
        Transform(60, "a", touch)  # type: ignore[arg-type]


# -- the report -----------------------------------------------------------------------------------


def test_what_was_composed_is_printable_and_kept_with_the_run(tmp_path: Path) -> None:
    plugins = [
        plugin("Second", Phase.SHARD, lambda part: Applied(part, ("layers.1", "layers.0"), "two units")),
        plugin("First", Phase.TENSOR, lambda part: Applied(part, ("head",)), slot="tp"),
        type("Idle", (Plugin,), {"parallelize": hookimpl(lambda self, job: None)}),
    ]
    expected = [
        {"phase": "TENSOR", "slot": "tp", "plugin": "first", "matched": ["head"], "note": ""},
        {
            "phase": "SHARD",
            "slot": "second",
            "plugin": "second",
            "matched": ["layers.0", "layers.1"],
            "note": "two units",
        },
    ]
    with toys.job(*plugins, folder=tmp_path) as job:
        composition = compose(job, allocate=False)
    assert composition.report == expected
    assert composition.idle == ("idle",)
    assert all(parameter.is_meta for parameter in composition.model.parameters())
    run = toys.run(tmp_path, *plugins, steps=1).run
    assert json.loads((run / "composition.json").read_text(encoding="utf-8")) == expected


# -- invariants -----------------------------------------------------------------------------------


def test_matching_nothing_is_an_error(tmp_path: Path) -> None:
    nothing = plugin("Blind", Phase.TENSOR, lambda part: Applied(part, ()))
    assert complaint(tmp_path, ConfigError, nothing) == (
        "Plugin 'blind' (under-test 0), 'blind' matched nothing in this model; "
        "leave blind out of --plugins, or mend its filter."
    )


def test_matching_in_one_of_two_parts_is_enough(tmp_path: Path) -> None:
    def apply(part: nn.Module) -> Applied:
        return Applied(part, ("head",), "widened") if part.head is not None else Applied(part, ())

    report = composed(tmp_path, toys.Cut, plugin("Late", Phase.TENSOR, apply)).report
    assert [(line["plugin"], line["matched"]) for line in report] == [("cut", ["layers"]), ("late", ["head"])]
    assert report[1]["note"] == "widened"


def rename(part: nn.Module) -> Applied:
    part.wrapped = part.head
    del part.head
    part.head = None
    return Applied(part, ("head",))


def test_renamed_parameters_are_refused(tmp_path: Path) -> None:
    message = complaint(tmp_path, PluginError, plugin("Wrapper", Phase.RECOMPUTE, rename))
    assert "'wrapper' changed parameter names; lost: head.weight; new: wrapped.weight." in message


def adapt(part: nn.Module) -> Applied:
    """Low-rank adapters on the blocks' first linears, their base frozen."""
    matched, added = [], []
    for path, module in list(part.named_modules()):
        if path.endswith(".up") and isinstance(module, nn.Linear):
            swap(part, path, toys.LowRank(module, 2))
            matched.append(path)
            added += [f"{path}.down", f"{path}.up"]
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(name in added)
    return Applied(part, tuple(matched), added=tuple(added))


def test_added_parameters_are_named_and_initialised(tmp_path: Path) -> None:
    model = composed(tmp_path, plugin("Lora", Phase.ADAPT, adapt)).model
    parameters = dict(model.named_parameters())
    assert parameters["layers.0.up.up"].count_nonzero() == 0
    assert parameters["layers.1.up.down"].std() > 0.01
    undeclared = plugin("Lora", Phase.ADAPT, lambda part: Applied(adapt(part).model, ("x",)))
    assert "new: layers.0.up.down, layers.0.up.up, layers.1.up.down, … 1 more" in complaint(
        tmp_path, PluginError, undeclared
    )


def test_frozen_parameters_do_not_move(tmp_path: Path) -> None:
    run = toys.run(tmp_path, plugin("Lora", Phase.ADAPT, adapt), config={"adamw.lr": 0.05})
    start = composed(tmp_path, plugin("Lora", Phase.ADAPT, adapt)).model.state_dict()
    moved = {name for name, value in run.model.state_dict().items() if not torch.equal(value, start[name])}
    assert moved == {f"layers.{index}.up.{name}" for index in (0, 1) for name in ("down", "up")}


def add_hook(part: nn.Module) -> Applied:
    """What tensor parallelism does to linears."""
    part.get_submodule("layers.0.up").register_forward_hook(lambda module, inputs, output: output * 1.0)
    part.get_submodule("layers.0.up").register_forward_pre_hook(lambda module, inputs: None)
    return Applied(part, ("layers.0.up",))


def replace(part: nn.Module, *, keep: bool) -> Applied:
    old = part.get_submodule("layers.0.up")
    new = nn.Linear(old.in_features, old.out_features, bias=False, device="meta")
    new.weight = old.weight
    if keep:
        swap(part, "layers.0.up", new)
    else:
        part.get_submodule("layers.0").up = new
    return Applied(part, ("layers.0.up",))


def test_lost_hooks_are_refused_and_swap_carries_them(tmp_path: Path) -> None:
    tensor = plugin("Tp", Phase.TENSOR, add_hook)
    drops = plugin("Fp8", Phase.FLOAT8, lambda part: replace(part, keep=False))
    message = complaint(tmp_path, PluginError, tensor, drops)
    assert re.search(
        r"'fp8' lost a hook of module 'layers\.0\.up' \(_forward_(pre_)?hooks\); replace modules with", message
    )
    keeps = plugin("Fp8", Phase.FLOAT8, lambda part: replace(part, keep=True))
    part = composed(tmp_path, tensor, keeps).model.parts[0]
    assert len(part.get_submodule("layers.0.up")._forward_hooks) == 1
    assert len(part.get_submodule("layers.0.up")._forward_pre_hooks) == 1


def test_swap_carries_every_kind_of_hook_and_the_mode() -> None:
    tower = toys.Tower(1)
    old = tower.layers["0"].up
    called: list[str] = []
    old.register_forward_pre_hook(lambda *a: called.append("pre"))
    old.register_forward_pre_hook(lambda *a: called.append("pre with"), with_kwargs=True)
    old.register_forward_hook(lambda *a: called.append("post"))
    old.register_forward_hook(lambda *a: called.append("post with"), with_kwargs=True, always_call=True)
    old.register_full_backward_hook(lambda *a: called.append("backward"))
    old.register_full_backward_pre_hook(lambda *a: called.append("pre backward"))
    old.eval()
    new = nn.Linear(8, 16, bias=False)
    swap(tower, "layers.0.up", new)
    assert tower.layers["0"].up is new
    assert not new.training
    new(torch.ones(1, 8, requires_grad=True)).sum().backward()
    assert sorted(called) == sorted(["pre", "pre with", "post", "post with", "backward", "pre backward"])
    for path in ("layers.7", "nowhere.at.all", ""):
        with pytest.raises(PluginError, match=f"swap: the model has no module '{path}' to replace"):
            swap(tower, path, new)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def untie(part: nn.Module) -> Applied:
        part.head.weight = nn.Parameter(torch.empty_like(part.head.weight))
        return Applied(part, ("head",))

    model = composed(tmp_path, plugin("Tp", Phase.TENSOR, untie), config={"toy_model.tied": True}).model
    (part,) = model.parts
    assert part.head.weight is part.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())

    def reshape(part: nn.Module) -> Applied:
        part.head.weight = nn.Parameter(torch.empty(3, 8, device="meta"))
        return Applied(part, ("head",))

    message = complaint(tmp_path, PluginError, plugin("Tp", Phase.TENSOR, reshape), config={"toy_model.tied": True})
    assert message.endswith("'tp' untied head.weight from embedding.weight, and they no longer fit each other.")


def test_a_part_of_a_parameter_is_a_dtensor(tmp_path: Path) -> None:
    """Otherwise a checkpoint would have one rank's rows, and a run would be none the wiser."""

    def cut(part: nn.Module) -> Applied:
        part.head.weight = nn.Parameter(part.head.weight[:3])
        return Applied(part, ("head",))

    message = complaint(tmp_path, PluginError, plugin("Late", Phase.RECOMPUTE, cut))
    assert "'late' changed the shape of parameters; cut: head.weight. A part of one must be a DTensor" in message


def test_a_tie_across_parts_is_refused(tmp_path: Path) -> None:
    message = complaint(tmp_path, ConfigError, toys.Cut, config={"toy_model.tied": True})
    assert "would put the tied parameters embedding.weight and head.weight into different parts" in message


def test_a_layer_that_is_left_in_two_parts_is_refused(tmp_path: Path) -> None:
    def careless(whole: nn.Module) -> Applied:
        import copy

        return Applied([copy.deepcopy(whole), copy.deepcopy(whole)], ("layers",))

    message = complaint(tmp_path, PluginError, plugin("Pp", Phase.PIPELINE, careless))
    assert (
        "left parameters in several parts; twice: embedding.weight, head.weight, layers.0.down.weight, … 5 more"
        in message
    )


@pytest.mark.parametrize(
    ("apply", "error", "says"),
    [
        (
            lambda part: part,
            PluginError,
            "must return an Applied, found a Tower.",
        ),
        (lambda part: Applied([part], ("x",)), PluginError, "only a PIPELINE transform may give several parts."),
        (lambda part: 1 / 0, ZeroDivisionError, "division by zero"),
    ],
)
def test_what_apply_may_give(tmp_path: Path, apply: Any, error: type[Exception], says: str) -> None:
    assert says in complaint(tmp_path, error, plugin("Odd", Phase.TENSOR, apply))


def test_a_transform_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        composed(tmp_path, plugin("Odd", Phase.TENSOR, lambda part: 1 / 0))
    assert caught.value.__notes__ == ["in plugin 'odd' (under-test 0), hook parallelize (odd)"]


# -- coverage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", CONFIGURED)
def test_every_axis_larger_than_one_is_covered_by_somebody(tmp_path: Path, axis: str) -> None:
    layout = Layout(**{axis: 2})
    message = complaint(tmp_path, ConfigError, world=layout)
    assert message.startswith(f"parallel.{axis} is 2, but no enabled plugin covers the axis {axis!r}.")
    covering = plugin("Covers", Phase.SHARD, touch, covers=(axis,))
    assert composed(tmp_path, covering, allocate=False, world=layout).report


def test_a_precision_is_covered_by_somebody(tmp_path: Path) -> None:
    config = {"train.precision": "bf16"}
    message = complaint(tmp_path, ConfigError, config=config, without=["precision"])
    assert message.startswith("train.precision is 'bf16', but no enabled plugin covers 'precision'.")
    composed(tmp_path, plugin("Covers", Phase.SHARD, touch, covers=("precision",)), config=config)


class Sideways(Plugin):
    """Covers an axis, unless it is told not to."""

    @hookimpl
    def parallelize(self, job: Any) -> Transform | None:
        return Transform(Phase.PIPELINE, "sideways", touch, covers=("pp",)) if job.dist.layout.tp == 1 else None


def test_the_plugins_that_would_cover_it_are_named(tmp_path: Path) -> None:
    def offered(*plugins: Any, **axes: int) -> list[str]:
        message = complaint(tmp_path, ConfigError, *plugins, world=Layout(**axes))
        return re.sub(r".* do: |; enable one with --plugins\.$", "", message).split(", ")

    with installed([Sideways]):
        assert {"ddp", "fsdp2", "zero1"} <= set(offered(dp_shard=2))
        assert "sideways" in offered(pp=2)
        assert "sideways" not in offered(Sideways, pp=2, tp=2), "it is enabled already"
        assert not {"ddp", "sideways"} & set(offered(tp=2))


def test_what_a_plugin_covers_is_read_from_its_text() -> None:
    found = {found.name: covers(found) for found in discover()}
    assert found["tp"] == {"tp"}
    assert found["zero1"] == {"dp_replicate", "dp_shard", "precision"}
    assert not found["adamw"]


# -- parts ----------------------------------------------------------------------------------------


def test_later_transforms_are_applied_once_to_each_part(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def apply(part: nn.Module) -> Applied:
        seen.append([name for name, _ in part.named_parameters()])
        return Applied(part, part.units)

    model = composed(tmp_path, toys.Cut, plugin("Shards", Phase.SHARD, apply)).model
    assert len(seen) == len(model.parts) == 2
    assert [name.split(".")[1] for names in seen for name in names if name.startswith("layers")] == ["0"] * 3 + [
        "1"
    ] * 3


def test_a_cut_model_has_the_names_and_the_initial_weights_of_the_whole(tmp_path: Path) -> None:
    whole, cut = composed(tmp_path).model, composed(tmp_path, toys.Cut).model
    assert [name for name, _ in whole.named_parameters()] == [name for name, _ in cut.named_parameters()]
    assert whole.state_dict().keys() == cut.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.equal(value, cut.state_dict()[name])
    assert cut.roles == whole.roles
    with pytest.raises(ConfigError, match="A pipeline has cut the model into parts"):
        cut(torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_a_cut_model_trains_bit_for_bit_like_the_whole(tmp_path: Path, optimizer: str) -> None:
    config = {f"{optimizer}.lr": 0.02, "train.evaluate_every": 2, "checkpoint.every": 3}
    config |= {} if optimizer == "adamw" else {"defaults.optimizer": "lion"}
    whole = toys.run(tmp_path / "a", toys.Average, config=config, steps=6)
    cut = toys.run(tmp_path / "b", toys.Average, toys.Cut, config=config, steps=6)
    assert cut.numbers == whole.numbers
    assert whole.losses[-1] != whole.losses[0]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, cut.model.state_dict()[name])
    evaluations = [[e["loss"] for e in run.events if e["event"] == "evaluation"] for run in (whole, cut)]
    assert evaluations[0] == evaluations[1]
    assert len(evaluations[0]) == 3


def test_a_cut_run_is_resumed_and_its_checkpoint_is_that_of_the_whole(tmp_path: Path) -> None:
    config = {"checkpoint.every": 2}
    through = toys.run(tmp_path, toys.Cut, toys.Average, config=config, name="through", steps=6)
    toys.run(tmp_path, toys.Cut, toys.Average, config=config, name="stopped", steps=6, stop_at=3)
    resumed = toys.run(tmp_path, toys.Cut, toys.Average, config=config, name="stopped", steps=6)
    assert resumed.numbers == through.numbers
    whole = toys.run(
        tmp_path,
        toys.Average,
        config={"checkpoint.allow_changes": ["cut", "sequential"]},
        resume=str(through.run / "checkpoints" / "step-00000006"),
        name="whole",
        steps=8,
    )
    assert [line["step"] for line in whole.metrics] == [7, 8]


def test_the_default_executor_refuses_several_parts(tmp_path: Path) -> None:
    def cut(whole: nn.Module) -> Applied:
        return Applied(list(toys.halves(whole)), ("layers",))

    with pytest.raises(ConfigError, match="sequential executor runs a whole model"):
        toys.run(tmp_path, plugin("Pp", Phase.PIPELINE, cut), name="x")
    assert not (tmp_path / "x").exists()


# -- what the engine calls ------------------------------------------------------------------------


def test_the_engine_calls_what_transforms_asked_for(tmp_path: Path) -> None:
    calls: list[Any] = []

    def apply(part: nn.Module) -> Applied:
        return Applied(
            part,
            ("head",),
            on_micro_batch=lambda micro: calls.append(micro.last),
            after_backward=lambda: calls.append("after"),
            free_gathered=lambda: calls.append("release"),
        )

    config = {"train.micro_batch": 1, "train.evaluate_every": 2}
    toys.run(tmp_path, plugin("Shards", Phase.SHARD, apply), steps=2, config=config)
    step = [False, False, False, True, "after"]
    assert calls == [*step, *step, "release"]


# -- starting values ------------------------------------------------------------------------------


def test_a_parameter_that_nobody_starts_is_refused(tmp_path: Path) -> None:
    class Bare(Plugin):
        @hookimpl
        def build_model(self, job: Any) -> nn.Module:
            model = toys.Tower(1)
            model.layers["0"].up = nn.Linear(toys.DIM, 2 * toys.DIM, bias=False)
            return model

    with toys.job(Bare, folder=tmp_path, without=["toy_model"]) as job, pytest.raises(PluginError) as caught:
        compose(job)
    assert "Nobody declares how parameter 'layers.0.up.weight' (Linear) starts" in str(caught.value)


def test_a_module_further_out_may_declare_the_start(tmp_path: Path) -> None:
    class Outer(toys.Tower):
        def initial(self, name: str) -> Init | None:
            return Init("ones") if name == "layers.0.up.weight" else None

    class Bare(Plugin):
        @hookimpl
        def build_model(self, job: Any) -> nn.Module:
            model = Outer(1)
            model.layers["0"].up = nn.Linear(toys.DIM, 2 * toys.DIM, bias=False)
            return model

    with toys.job(Bare, folder=tmp_path, without=["toy_model"]) as job:
        assert compose(job).model.parts[0].get_parameter("layers.0.up.weight").eq(1).all()


def test_buffers_are_filled_after_they_were_built_on_the_meta_device(tmp_path: Path) -> None:
    class Buffered(nn.Module):
        def __init__(self, resets: bool) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(3.0), persistent=False)
            self.register_buffer("count", torch.ones(()))
            if resets:
                self.reset_buffers = self.fill

        def fill(self) -> None:
            self.table = torch.arange(3.0)
            self.count = torch.full((), 7.0)

    def building(resets: bool) -> type[Plugin]:
        class Bare(Plugin):
            @hookimpl
            def build_model(self, job: Any) -> nn.Module:
                model = toys.Tower(1)
                model.extra = Buffered(resets)
                return model

        return Bare

    with toys.job(building(True), folder=tmp_path, without=["toy_model"]) as job:
        model = compose(job).model
    assert model.parts[0].extra.table.tolist() == [0, 1, 2]
    assert model.state_dict()["extra.count"] == 7
    assert "extra.table" not in model.state_dict()

    class Around(toys.Tower):
        times = 0

        def reset_buffers(self) -> None:
            self.times += 1
            self.extra.fill()
            self.other.fill()

    class Outer(Plugin):
        @hookimpl
        def build_model(self, job: Any) -> nn.Module:
            model = Around(1)
            model.extra, model.other = Buffered(False), Buffered(False)
            return model

    with toys.job(Outer, folder=tmp_path, without=["toy_model"]) as job:
        part: Any = compose(job).model.parts[0]
    assert (part.times, part.other.table.tolist()) == (1, [0, 1, 2])
    with toys.job(building(False), folder=tmp_path, without=["toy_model"]) as job, pytest.raises(PluginError) as caught:
        compose(job)
    assert "Module 'extra' (Buffered) has buffers but no `reset_buffers()`" in str(caught.value)


# -- classes --------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_modules_of_one_class_get_one_new_class_and_stay_themselves() -> None:
    modules, asked = [nn.Linear(2, 2) for _ in range(3)], []

    def change(own: type, factor: float) -> Any:
        asked.append(factor)
        return Doubled if factor == 2 else {"forward": lambda self, x: factor * own.forward(self, x)}

    x, before = torch.ones(2), [module(torch.ones(2)) for module in modules]
    special = Specialisation(change)
    for module, factor in zip(modules, (2, 2, 3), strict=True):
        special(module, factor)
    assert asked == [2, 3]
    assert type(modules[0]) is type(modules[1]) is not type(modules[2])
    assert all(isinstance(module, nn.Linear) and type(module).__name__ == "Linear" for module in modules)
    for module, factor, plain in zip(modules, (2, 2, 3), before, strict=True):
        assert torch.equal(module(x), factor * plain)


def test_a_forward_that_would_hide_the_class_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.forward = module.forward  # type: ignore[method-assign]
    with pytest.raises(PluginError, match="replaced the forward of one Linear"):
        Specialisation(lambda own: Doubled)(module)


@pytest.mark.parametrize(("ep", "place"), [(1, "experts"), (2, "norm"), (2, "experts")])
def test_what_is_added_to_spread_experts_is_split_as_they_are(ep: int, place: str) -> None:
    """A whole one would differ between ranks: nothing sums its gradients, and a checkpoint holds that of one rank."""
    part = nn.ModuleDict({"experts": nn.Linear(2, 2), "norm": nn.Linear(2, 2)})
    part["experts"].domain = "expert"
    told = pytest.raises(ConfigError, match="Plugin 'x' adds 'experts.bias' to experts, which parallel.ep = 2 spreads")
    with told if (ep, place) == (2, "experts") else nullcontext():
        check_added("Plugin 'x'", Layout(dp_shard=2, ep=ep), [part], {f"{place}.bias"})

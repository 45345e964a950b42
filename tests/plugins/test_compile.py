"""`compile`: the same numbers, one graph for all units that are alike, and a summary of how it went."""

from __future__ import annotations

import itertools
import logging
import re
from typing import Any

import pytest
import setuptools  # noqa: F401  # inductor imports it, and it refuses to come after distutils
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch._dynamo.utils import counters

import fakes
from forge_train import Batch, BatchPhase, ConfigError, Plugin, PrepareBatch, StepResult, hookimpl
from forge_train_plugins.memory._compile import Summary, compile_unit, eager_where_new
from forge_train_plugins.memory.compile import Compile
from forge_train_tools.testing import RunForge

pytestmark = [pytest.mark.unit, pytest.mark.slow]

TRACED = {"compile.backend": "aot_eager", "decoder.layers": 3}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("plugins", "config"),
    [
        ((), {"compile.fullgraph": True, "train.evaluate_every": 1}),
        (("ac",), {"compile.fullgraph": True}),
        (("ac",), {"ac.mode": "selective"}),
        (("ac",), {"ac.mode": "memory_budget", "ac.budget": 0.2}),
    ],
)
def test_changes_no_number_and_compiles_alike_units_once(
    run_forge: RunForge, caplog: pytest.LogCaptureFixture, plugins: tuple[str, ...], config: dict[str, Any]
) -> None:
    plain = run_forge((), {"decoder.layers": 3})
    with caplog.at_level(logging.INFO, "forge_train"):
        run = run_forge([*plugins, "compile"], {**TRACED, **config})
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert list(run.model.state_dict()) == list(plain.model.state_dict())
    told = [record.getMessage() for record in caplog.records if "compile: " in record.getMessage()]
    assert len(told) == 1
    assert re.fullmatch(
        r"compile: 3 units in [12] graphs with 0 graph breaks, [\d.]+ s of compiling until step 1", told[0]
    )


class Lengths(Plugin):
    """Sequences of another length at each step."""

    api = (1, 0)
    LENGTHS = (16, 12, 1, 8)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.graphs: list[int] = []

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self.graphs.append(counters["stats"]["unique_graphs"])

    @hookimpl
    def prepare_batch(self, job: Any) -> Any:
        lengths = itertools.cycle(self.LENGTHS)

        def shorten(batch: Batch) -> Batch:
            length = next(lengths)
            return Batch(batch.inputs[:, :length].contiguous(), batch.labels[:, :length].contiguous())

        return PrepareBatch(BatchPhase.MAKE, shorten)


@pytest.mark.parametrize("plugins", [pytest.param((), marks=pytest.mark.extended), ("ac", "moe")])
def test_another_sequence_length_is_compiled_again(run_forge: RunForge, plugins: tuple[str, ...]) -> None:
    """And none that was seen before is."""
    values = {"train.micro_batch": 4, "train.global_batch": 4, "train.sequence": 16}
    plain = run_forge([*plugins, Lengths], values, steps=8)
    run = run_forge([*plugins, Lengths, "compile"], {**values, "compile.backend": "aot_eager"}, steps=8)
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    graphs = run.plugin("lengths").graphs
    assert graphs[0] < graphs[1]
    assert len(set(graphs[3:])) == 1


def test_inductor_trains_the_same(run_forge: RunForge) -> None:
    plain, run = run_forge(steps=2), run_forge(["compile"], {"decoder.layers": 2}, steps=2)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)


class Breaking(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_graph_breaks_are_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    summary, unit = Summary(), Breaking(2, 2)
    compile_unit(unit, backend="aot_eager", mode="default", fullgraph=False, dynamic=None)
    unit(torch.ones(1, 2))
    summary.units = 1
    with caplog.at_level(logging.INFO, "forge_train"):
        summary.tell(1)
        summary.tell(2)
    first, *reasons = [record.getMessage() for record in caplog.records if record.name == "forge_train"]
    assert "with 1 graph breaks" in first
    assert len(reasons) == 1
    assert "1 × graph break" in reasons[0]


@pytest.mark.parametrize("ac", [{"ac.mode": "full"}, {"ac.mode": "selective"}])
def test_around_what_can_not_be_compiled_the_rest_is_also_when_recomputed(
    run_forge: RunForge, caplog: pytest.LogCaptureFixture, ac: dict[str, Any]
) -> None:
    experts = {"decoder.layers": 3, "moe.experts": 4, "moe.shared": 1}
    plain = run_forge(["moe"], experts)
    with caplog.at_level(logging.INFO, "forge_train"):
        run = run_forge(["moe", "ac", "compile"], {**TRACED, **experts, **ac, "train.evaluate_every": 1})
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    told = [message for record in caplog.records if (message := record.getMessage()).startswith("compile: ")]
    assert re.match(r"compile: 3 units in [2-9] graphs with [1-6] graph breaks", told[0]), told


class Dropped(torch.nn.Linear):
    """Breaks where torch.compile (2.13) drops all that is around it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_where_nothing_is_compiled_one_sentence_says_so(caplog: pytest.LogCaptureFixture) -> None:
    summary, unit = Summary(), Dropped(2, 2)
    summary.units = 1
    compile_unit(unit, backend="aot_eager", mode="default", fullgraph=False, dynamic=None)
    unit(torch.ones(1, 2))
    with caplog.at_level(logging.INFO, "forge_train"):
        summary.tell(1)
    (told,) = (record.getMessage() for record in caplog.records if record.name == "forge_train")
    assert re.fullmatch(r"compile: torch.compile could compile none of .*, so the run trains uncompiled; .*\.", told)


def test_what_has_no_effect_or_is_not_there_is_refused(run_forge: RunForge) -> None:
    plugin = fakes.make(Compile, backend="eager", mode="max-autotune")
    assert [problem.key for problem in plugin.check_config(fakes.run_config())] == ["compile.mode"]
    with pytest.raises(ConfigError, match=r"compile\.backend: 'inducter' is not one of .*Did you mean 'inductor'"):
        run_forge(["compile"], {"compile.backend": "inducter"})


def test_the_stance_of_evaluations_holds_from_where_it_is_entered() -> None:
    def stance() -> str:
        return str(torch._dynamo.eval_frame._stance.stance)

    span = eager_where_new()  # torch's own would hold from here on, for the whole process
    assert stance() == "default"
    with span:
        assert stance() == "eager_on_recompile"
    assert stance() == "default"

"""The public API: what `forge_train` offers, what is imported for it, and the small types it consists of."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import forge_train
import toys
from forge_train import Batch, ConfigError, DivergedError, ForgeError, PluginError
from forge_train.base.errors import describe, nearest
from forge_train.config.sections import ParallelSection
from forge_train.mesh.axes import CONFIGURED
from forge_train.mesh.layout import Layout

pytestmark = pytest.mark.unit

ARCHITECTURE = """
Plugin section hookimpl Phase Transform Applied attach_loss Init Job Model Batch Update StepResult
CheckpointEvent Volatile Gt Ge Lt Le ForgeError ConfigError PluginError DivergedError
"""


def test_what_is_promised_is_there() -> None:
    assert set(ARCHITECTURE.split()) <= set(forge_train.__all__)
    for name in forge_train.__all__:
        assert getattr(forge_train, name) is not None
        assert name in dir(forge_train)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        forge_train.Nothing  # noqa: B018


def test_what_type_checkers_see_is_what_there_is() -> None:
    tree = ast.parse(Path(forge_train.__file__).read_text(encoding="utf-8"))
    seen = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            seen |= {alias.asname: node.module for alias in node.names if alias.asname}
    assert {name: f"forge_train.{module}" for name, module in seen.items()} == {
        name: f"forge_train.{module}" for name, module in forge_train._WHERE.items()
    }
    for name, module in seen.items():
        assert getattr(forge_train, str(name)) is getattr(importlib.import_module(f"forge_train.{module}"), str(name))


def test_a_plugin_is_written_without_importing_torch() -> None:
    code = (
        "import sys, forge_train as f, forge_train.registry.setup\n"
        "f.Plugin, f.section, f.hookimpl, f.Phase, f.Transform, f.Applied, f.Init, f.Batch\n"
        "print(sorted({'torch', 'pydantic', 'numpy', 'rich', 'tomlkit'} & sys.modules.keys()))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize(("error", "code"), [(ForgeError, 1), (ConfigError, 2), (PluginError, 1), (DivergedError, 3)])
def test_errors_know_their_exit_codes(error: type[ForgeError], code: int) -> None:
    assert error("x").code == code
    assert issubclass(error, ForgeError)


def test_words_for_errors() -> None:
    assert nearest("optimiser", ["optimizer", "loss"]) == " Did you mean 'optimizer'?"
    assert nearest("xyz", ["optimizer"]) == nearest("", ["optimizer"]) == ""
    for given, valid in (("r", "rank"), ("seq", "sequence"), ("learning_rate", "lr")):
        assert nearest(given, ["rslora", "loss", valid]) == f" Did you mean {valid!r}?"
    assert describe(ValueError("a\nb")) == "ValueError: a"
    assert describe(KeyError()) == "KeyError"


# -- batches --------------------------------------------------------------------------------------


def test_a_batch_moves_whole_and_gives_the_model_what_is_there() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    batch = Batch(ids, ids, document_ids=ids, extras={"image": torch.ones(2, 5)})
    assert batch.model_inputs().keys() == {"document_ids", "image"}
    moved = batch.to(torch.device("meta"))
    assert moved.inputs.is_meta
    assert moved.labels.is_meta
    assert moved.document_ids is not None
    assert moved.document_ids.is_meta
    assert moved.position_ids is None
    assert moved.extras["image"].is_meta
    assert not batch.inputs.is_meta


# -- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "world", "expected"),
    [
        ({}, 1, Layout()),
        ({}, 8, Layout(dp_shard=8)),
        ({"tp": 2, "pp": 2}, 8, Layout(tp=2, pp=2, dp_shard=2)),
        ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, 8, Layout(dp_replicate=2, dp_shard=2, cp=2)),
        ({"ep": 4, "tp": 2}, 8, Layout(ep=4, tp=2, dp_shard=4)),
        ({"ep": 4, "tp": 2, "etp": 2}, 8, Layout(ep=4, tp=2, etp=2, dp_shard=4)),
    ],
)
def test_axes_tile_the_world(parallel: dict[str, int], world: int, expected: Layout) -> None:
    assert Layout.of(ParallelSection(**parallel), world) == expected


@pytest.mark.parametrize(
    ("parallel", "world", "says"),
    [
        ({"tp": 3}, 8, "pp × dp_replicate × cp × tp = 1 × 1 × 1 × 3 = 3 does not divide the 8 processes."),
        ({"tp": 3, "dp_shard": 2}, 8, "dp_shard × cp × tp = 1 × 1 × 2 × 1 × 3 = 6, but there are 8 processes."),
        ({"tp": 2}, 1, "= 2, but there is 1 process."),
        ({"dp_shard": 2}, 8, "= 2, but there are 8 processes."),
        ({"tp": 4, "etp": 2}, 8, "parallel.etp: must be 1 or tp (4); it is 2."),
        ({"ep": 3}, 8, "parallel.ep: must divide dp_shard × cp × tp (8); it is 3."),
        ({"ep": 8, "tp": 2, "etp": 2}, 8, "parallel.ep: must divide dp_shard × cp (4); it is 8."),
    ],
)
def test_axes_that_do_not(parallel: dict[str, int], world: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Layout.of(ParallelSection(**parallel), world)
    assert says in str(caught.value)


def test_configuration_layout_and_meshes_have_the_axes_of_the_table() -> None:
    fields = {field.name for field in dataclasses.fields(ParallelSection)}
    assert fields == set(CONFIGURED) == {field.name for field in dataclasses.fields(Layout)} - {"others"}
    layout = Layout(pp=2, dp_replicate=3, dp_shard=5, cp=7, tp=2, ep=5, etp=2)
    for domain in ("dense", "expert", "batch", "flat"):
        assert math.prod(layout.domain(domain).values()) == 2 * 3 * 5 * 7 * 2, domain
    assert layout.efsdp == Layout(dp_shard=5, cp=7, ep=5).efsdp == 7


def test_who_works_on_other_data_and_who_averages() -> None:
    layout = Layout(dp_replicate=2, dp_shard=3, cp=5, tp=7)
    assert layout.dp == 6
    assert layout.grad_average_size == 30


# -- the meter ------------------------------------------------------------------------------------


def test_throughput_leaves_evaluations_and_checkpoints_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_train import Plugin, hookimpl

    class SlowSpans(Plugin):
        @hookimpl
        def around(self, span: str) -> object:
            @contextmanager
            def slow() -> object:  # type: ignore[misc]
                now[0] += {"evaluate": 8.0, "save": 8.0, "step": 0.25}.get(span, 0.0)
                yield

            return slow

    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    config = {"train.evaluate_every": 1, "checkpoint.every": 1, "log.every": 2}
    run = toys.run(tmp_path, SlowSpans, "mfu", steps=4, config=config)
    for line in run.metrics:
        assert line["step_seconds"] == 0.25
        assert line["tokens_per_second"] == pytest.approx(24 / line["step_seconds"], rel=1e-6)
        assert line["mfu"] is None
        assert line["memory_gib"] > 0.01


@pytest.mark.slow
def test_memory_is_that_of_this_process_alone() -> None:
    """Not of the one that started it, with whose peak a new process begins on Linux."""
    own = "import torch; from forge_train.step.aggregate import memory_gib; print(memory_gib(torch.device('cpu')))"
    large = f"import subprocess, sys; kept = b'x' * 2**30; subprocess.run([sys.executable, '-c', {own!r}], check=True)"
    ended = subprocess.run([sys.executable, "-c", large], capture_output=True, text=True, check=True)
    assert 0.01 < float(ended.stdout) < 0.9


def test_mfu_where_a_peak_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    from forge_train import Plugin, hookimpl

    class Counts(toys.Tower):
        def flops_per_token(self, sequence: int) -> int:
            return 1000 * sequence

    class SlowCount(Plugin):
        @hookimpl
        def build_model(self) -> nn.Module:
            return Counts(1)

        @hookimpl
        def around(self, span: str) -> object:
            return lambda: passing({"evaluate": 8.0, "save": 4.0, "forward_backward": 0.25}.get(span, 0.0))

    @contextmanager
    def passing(seconds: float) -> Iterator[None]:
        now[0] += seconds
        yield

    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    config = {"log.peak_tflops": 1e-6, "log.every": 2, "train.evaluate_every": 1, "checkpoint.every": 1}
    run = toys.run(tmp_path, SlowCount, "mfu", config=config, without=["toy_model"], steps=6)
    assert len(run.metrics) == 3
    for line in run.metrics:
        assert line["mfu"] == pytest.approx(line["tokens_per_second"] * 6000 / 1e6, rel=1e-6)
        assert "mfu" in line["timing"]

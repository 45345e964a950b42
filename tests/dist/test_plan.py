"""`forge plan` against ranks that really train: bytes held, at the peak, and sent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import plan_cases
from crossed import marked
from forge_train_tools.planning import Plan, plan
from forge_train_tools.testing import Pool
from forge_train_tools.testing.runs import prepared
from items_data import write_records

pytestmark = [pytest.mark.dist]

Settings = Mapping[str, Any]
TP2, HSDP = {"parallel.tp": 2}, {"parallel.dp_replicate": 2}
BF16 = {"train.precision": "bf16"}
TINY = {"train.global_batch": 16, "train.micro_batch": 2, "decoder.kv_heads": 4}
HALF, ONE = {"train.global_batch": 8}, {"train.micro_batch": 1}
REST = {"run.device": "cpu", "train.evaluate_every": 0}
QUICK = {"text.baseline": False, **REST}
CUT = {"decoder.dim": 80, "decoder.heads": 4, "decoder.head_dim": 20, "decoder.hidden": 132}
"""Rows whose blocks tensor parallelism cuts: scales are reduced."""
PICTURES = {
    "train.sequence": 68,
    "multimodal.packing": "pad",
    "multimodal.held_out": 0,
    **{f"image.{key}": value for key, value in {"size": 32, "patch": 8, "merge": 1, "dim": 128, "layers": 4}.items()},
    "image.heads": 4,
}
"""Of 16 patches; a text that is nothing else takes 17 positions."""
PACKED = {**PICTURES, "multimodal.packing": "best_fit"}
CASES: dict[str, tuple[str, int, tuple[str, ...], Settings]] = {
    "one process": ("quickstart", 1, (), {}),
    "one process, ac": ("quickstart", 1, ("ac",), {}),
    "one process, ac selective": ("quickstart", 1, ("ac",), {"ac.mode": "selective"}),
    "one process, bf16, in three": ("quickstart", 1, (), {"train.micro_batch": 2, **BF16}),
    "one process, pictures": ("quickstart", 1, ("multimodal", "image"), PACKED),
    "one process, pictures, ac": ("quickstart", 1, ("multimodal", "image", "mot", "ac"), PACKED),
    "one process, pictures, experts": (
        "quickstart",
        1,
        ("multimodal", "image", "moma", "moe"),
        {**PACKED, "moe.experts": 4},
    ),
    "one process, pictures beside": (
        "quickstart",
        1,
        ("multimodal", "image", "cross_attention"),
        {**PICTURES, "cross_attention.every": 2},
    ),
    "quickstart fsdp2, pictures": ("quickstart", 2, ("multimodal", "image", "fsdp2"), PACKED),
    "quickstart fsdp2": ("quickstart", 4, ("fsdp2",), {}),
    "quickstart fsdp2, ac selective": ("quickstart", 4, ("fsdp2", "ac"), {"ac.mode": "selective"}),
    "quickstart tp2 × dp2, ac": ("quickstart", 4, ("fsdp2", "tp", "ac"), TP2),
    "fsdp2 bf16, two micro-batches": ("tiny", 2, ("fsdp2",), {**BF16, **HALF}),
    "fsdp2 ZeRO-2, four micro-batches": ("tiny", 2, ("fsdp2",), {"fsdp2.reshard": "never", **HALF, **ONE}),
    "fsdp2 once a step, four": ("tiny", 2, ("fsdp2",), {"fsdp2.reshard": "step", **HALF, **ONE}),
    "hsdp": ("tiny", 4, ("fsdp2",), {**HSDP, "decoder.tied": True}),
    "hsdp bf16, gathered in float8": ("tiny", 4, ("fsdp2", "fp8"), {**HSDP, **BF16, "fp8.all_gather": True}),
    "tp2 × dp2": ("tiny", 4, ("tp", "fsdp2"), TP2),
    "tp2 × dp2 bf16, tied": ("tiny", 4, ("tp", "fsdp2"), {**TP2, **BF16, "decoder.tied": True}),
    "tp2 × dp2, parameters and moments in bf16": (
        "tiny",
        4,
        ("tp", "fsdp2", "bf16_parameters"),
        {**TP2, **BF16, "adamw.state.first": "bf16", "adamw.state.second": "bf16"},
    ),
    "tp2 × dp2, moments in 8 and 4 bits": (
        "tiny",
        4,
        ("tp", "fsdp2"),
        {**TP2, **CUT, "adamw.state.first": "8bit", "adamw.state.second": "4bit"},
    ),
    "cp2 × dp2, passed on": ("tiny", 4, ("cp", "fsdp2", "flex"), {"parallel.cp": 2, "cp.method": "ring"}),
    "ddp": ("tiny", 2, ("ddp",), HALF),
    "ddp bf16": ("tiny", 4, ("ddp",), BF16),
    "zero1": ("tiny", 4, ("zero1",), {}),
    "zero1 bf16, lion": ("tiny", 2, ("zero1", "lion"), {**BF16, **HALF}),
}
EXTENDED = (
    *("one process, pictures, ac", "one process, pictures, experts", "quickstart fsdp2, pictures"),
    *("one process, ac", "one process, bf16, in three", "quickstart fsdp2", "quickstart fsdp2, ac selective"),
    "hsdp bf16, gathered in float8",
    *("cp2 × dp2, passed on", "quickstart tp2 × dp2, ac", "tp2 × dp2, moments in 8 and 4 bits"),
    *("tp2 × dp2", "tp2 × dp2 bf16, tied", "tp2 × dp2, parameters and moments in bf16", "ddp bf16", "zero1"),
)
"""CI has the same layout in another precision, or another one with the same option."""


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def make(preset: str, world: int, plugins: tuple[str, ...], config: Settings) -> Plan:
        launched = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        for name, value in {**launched, "MASTER_ADDR": "here", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))
        without = plan_cases.without(preset, plugins)
        with prepared(plugins, config, without=without, preset=preset, folder=tmp_path) as setup:
            return plan(setup, world=world, folder=tmp_path / "none")

    return make


def pictures(folder: Path) -> Path:
    """Records of a picture each; four fit into a row."""
    Image = pytest.importorskip("PIL.Image")
    for number in range(64):
        Image.new("RGB", (32, 32), (number, 0, 0)).save(folder / f"{number}.png")
    return write_records(folder / "p.jsonl", [{"text": "<image>", "images": [f"{one}.png"]} for one in range(64)])


@pytest.mark.parametrize("case", marked(CASES, EXTENDED))
def test_is_what_a_rank_holds_and_sends(ranks: Pool, planned: Any, tmp_path: Path, case: str) -> None:
    preset, world, plugins, config = CASES[case]
    base = TINY if preset == "tiny" else {**QUICK, "text.path": str(tmp_path / ".testing" / "text")}
    if "multimodal" in plugins:
        base = {**REST, "multimodal.path": str(pictures(tmp_path))}
    config = {**base, **config}
    made: Plan = planned(preset, world, plugins, config)
    real = ranks.run(plan_cases.measure, world, folder=str(tmp_path), plugins=plugins, config=config, preset=preset)[0]
    memory = made.memory
    resident = memory.parameters + memory.buffers + (memory.optimizer or 0)
    assert memory.notes == ()
    assert memory.peak is not None
    print(f"{(memory.peak - resident) / real['peak']:.3f} of the {real['peak']:,} bytes that come and go; {memory}")
    for what in ("parameters", "buffers", "gradients", "optimizer"):
        assert getattr(memory, what) == real[what], what
    counted = {f"{one.kind} {one.axis}": [one.count, one.bytes] for one in made.communication}
    assert counted == {what: pytest.approx(numbers) for what, numbers in real["sent"].items()}
    if preset == "quickstart":
        assert memory.peak - resident == pytest.approx(real["peak"], rel=0.15)


def test_layouts_are_planned_in_turn(planned: Any) -> None:
    """A mesh of the first equals one of the second in shape, but its process groups are gone."""
    experts = {**TINY, "moe.experts": 8, "parallel.ep": 2, "decoder.layers": 1}
    over_tp = ("tiny", 4, ("moe", "ep", "tp"), {**experts, **TP2})
    first = planned(*over_tp)
    other = planned("tiny", 4, ("moe", "ep"), experts)
    assert other.communication != first.communication
    assert planned(*over_tp) == first


LONG = {
    "train.global_batch": 2,
    "train.micro_batch": 2,
    "train.sequence": 1024,
    "decoder.max_sequence": 1024,
    "decoder.heads": 4,
    "decoder.kv_heads": 4,
    "decoder.head_dim": 8,
    "decoder.layers": 1,
}
FEATURES, LAYERS = 4 * 8, 1
"""Of queries, as of keys and of values."""
WAYS: dict[str, tuple[dict[str, str], int]] = {
    "gather": ({"all_gather": "keys, values", "reduce_scatter": "their gradients"}, 2 * 2 * FEATURES),
    "ulysses": ({"all_to_all": "queries, keys, values, outputs, and their gradients"}, 2 * 4 * FEATURES // 4),
    "ring": ({"send": "keys, values twice, and their gradients"}, 3 * 2 * FEATURES),
}


@pytest.mark.parametrize("method", WAYS)
def test_context_parallelism_sends_what_its_formula_says(planned: Any, method: str) -> None:
    """Of tokens' features in fp32, each rank sends all but its own share."""
    config = {**LONG, "parallel.cp": 4, "cp.method": method, "text.isolate": False}
    kinds, features = WAYS[method]
    made: Plan = planned("tiny", 4, ("cp", "ddp", "flex"), config)
    assert made.memory.notes == ()
    sent = sum(one.bytes for one in made.communication if one.kind in kinds)
    textbook = 4 * features * LAYERS * 2 * 1024 * 3 / 4
    assert textbook <= sent <= 1.05 * textbook
    averaged = sum(one.bytes for one in made.communication if one.kind == "all_reduce")
    assert made.expected_bytes["cp"] == pytest.approx(sent + averaged, rel=0.05)


@pytest.mark.extended
def test_the_order_of_plugins_plays_no_part_beside_context_parallelism(planned: Any) -> None:
    names, config = ("cp", "tp", "fsdp2", "ac"), {**TINY, **TP2, "parallel.cp": 2, "ac.mode": "full"}
    made = [planned("tiny", 8, order, config).phases for order in (names, names[::-1], names[2:] + names[:2])]
    assert [line["plugin"] for line in made[0]] == ["tp", "cp", "ac", "fsdp2"]
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("method", marked(["ring", "ulysses"], ["ring"]))
def test_activations_are_divided_by_the_ranks_of_context_parallelism(planned: Any, method: str) -> None:
    def activations(ranks: int) -> int:
        settings = {"parallel.cp": ranks, "cp.method": method} if ranks > 1 else {}
        made: Plan = planned("tiny", ranks, ("cp", "ddp", "flex") if ranks > 1 else ("flex",), {**LONG, **settings})
        assert made.memory.activations is not None
        return made.memory.activations

    whole = activations(1)
    for ranks in (2, 4):
        assert activations(ranks) == pytest.approx(whole / ranks, rel=0.15)

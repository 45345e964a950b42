"""tp against one process: losses, norms, first gradients, replicas, bytes sent; and what it refuses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_train.testing import Pool, PoolError

pytestmark = [pytest.mark.dist, pytest.mark.accept("dist", 2)]

Settings = Mapping[str, Any]
LAYOUT = ("parallel.", "tp.", "ac.", "compile.", "fsdp2.", "train.micro_batch", "probe.count")


class Runs:
    """Runs, those on one process trained once."""

    def __init__(self, ranks: Pool, folder: Path) -> None:
        self.ranks, self.folder, self.known = ranks, folder, {}
        self.numbers = itertools.count()

    def train(self, world: int, plugins: tuple[str, ...], config: Settings, **more: Any) -> list[dict[str, Any]]:
        folder = self.folder / str(next(self.numbers))
        folder.mkdir()
        replies = self.ranks.run(
            "tp_cases:train",
            world,
            folder=str(folder),
            plugins=plugins,
            config={"train.micro_batch": 6, **config},
            timeout=100,
            **{"steps": 5, **more},
        )
        tensors = torch.load(folder / "run.pt")
        return [{**reply, "tensors": tensors} for reply in replies]

    def one(self, config: Settings, third: bool = False) -> dict[str, Any]:
        config = {key: value for key, value in config.items() if not key.startswith(LAYOUT)}
        key = json.dumps([config, third], sort_keys=True)
        if key not in self.known:
            (self.known[key],) = self.train(1, (), config, third=third)
        return self.known[key]


@pytest.fixture(scope="module")
def runs(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("tp"))


TP2, TP4 = {"parallel.tp": 2}, {"parallel.tp": 4, "decoder.kv_heads": 4}
WHOLE = {"tp.sequence_parallel": False}
LOGITS = {"tp.loss_parallel": False}
RICH = {
    "decoder.qk_norm": True,
    "decoder.bias": True,
    "decoder.qkv_bias": True,
    "decoder.norm": "layer",
    "swiglu.activation": "gelu",
}
LOSS = {"cross_entropy.z_loss": 1e-2, "cross_entropy.chunk": 16}
CASES: list[tuple[str, int, tuple[str, ...], Settings]] = [
    ("tp2", 2, ("tp",), {**TP2, "train.micro_batch": 12}),
    ("tp2, three micro-batches, masked", 2, ("tp",), {**TP2, "train.micro_batch": 4, "probe.mask": True}),
    ("tp2 tied", 2, ("tp",), {**TP2, "decoder.tied": True}),
    ("tp2 whole sequences", 2, ("tp",), {**TP2, **WHOLE}),
    ("tp2 whole sequences, tied, whole logits", 2, ("tp",), {**TP2, **WHOLE, **LOGITS, "decoder.tied": True}),
    ("tp2 whole logits", 2, ("tp",), {**TP2, **LOGITS}),
    ("tp2 biases, norms, gelu, z-loss in chunks", 2, ("tp",), {**TP2, **RICH, **LOSS}),
    ("tp2 biases, whole sequences", 2, ("tp",), {**TP2, **RICH, **LOSS, **WHOLE}),
    ("tp2 one long text, uneven sequence", 2, ("tp",), {**TP2, "text.isolate": False, "train.sequence": 31}),
    ("tp2 ac", 2, ("tp", "ac"), {**TP2, "probe.mask": True}),
    ("tp2 ac selective", 2, ("tp", "ac"), {**TP2, "ac.mode": "selective", "ac.save": ["attention", "collectives"]}),
    (
        "tp2 ac, compiled",
        2,
        ("tp", "ac", "compile"),
        {**TP2, "compile.backend": "aot_eager", "compile.fullgraph": True, "probe.count": False},
    ),
    ("tp4", 4, ("tp",), TP4),
    ("tp4 biases, tied", 4, ("tp",), {**TP4, **RICH, "decoder.tied": True}),
    ("tp2 × dp2, three micro-batches", 4, ("tp",), {**TP2, "train.micro_batch": 2}),
    ("tp2 × dp2 ac, tied, masked", 4, ("tp", "ac"), {**TP2, "decoder.tied": True, "probe.mask": True, **LOSS}),
    ("tp2 × replicas", 4, ("tp",), {**TP2, **RICH, **WHOLE, "parallel.dp_replicate": 2, "train.micro_batch": 2}),
]


def compare(one: dict[str, Any], every: list[dict[str, Any]]) -> None:
    first = every[0]
    assert first["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert first["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert first["tensors"]["gradients"].keys() == one["tensors"]["gradients"].keys()
    for name, expected in one["tensors"]["gradients"].items():
        gap = (first["tensors"]["gradients"][name] - expected).abs().max() / expected.abs().max()
        assert float(gap) < 1e-5, f"first gradient of {name}"
    assert len({tuple(reply["grad_norms"]) for reply in every}) == 1, "norms are bit-equal on all ranks"
    for name in first["replicas"]:
        parts: dict[str, set[str]] = {}
        for reply in every:
            part, _, content = reply["replicas"][name].rpartition(" ")
            parts.setdefault(part, set()).add(content)
        assert all(len(contents) == 1 for contents in parts.values()), f"replicas of {name} differ"


@pytest.mark.parametrize(("world", "plugins", "config"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_is_equal_to_one_process(runs: Runs, world: int, plugins: tuple[str, ...], config: Settings) -> None:
    every = runs.train(world, plugins, config)
    compare(runs.one(config), every)
    assert every[0]["batches"] == every[1]["batches"], "ranks that split one model see the same batches"


@pytest.mark.parametrize("config", [TP2, {**TP2, **WHOLE}])
def test_splits_a_third_partys_model_and_its_unnamed_parameters(runs: Runs, config: Settings) -> None:
    compare(runs.one({}, third=True), runs.train(2, ("tp",), config, third=True))


@pytest.mark.parametrize("config", [{}, LOGITS, WHOLE])
def test_evaluates_like_one_process_and_trains_on(runs: Runs, config: Settings) -> None:
    evaluated = {"train.evaluate_every": 2, "train.evaluate_batches": 3, **LOSS}
    reply, one = runs.train(2, ("tp",), {**TP2, **config, **evaluated})[0], runs.one(evaluated)
    assert reply["evaluations"] == pytest.approx(one["evaluations"], rel=1e-5)
    assert reply["losses"] == pytest.approx(one["losses"], rel=1e-5)


def test_writes_the_same_text(runs: Runs) -> None:
    """Token after token, with a cache of this rank's heads; a single token leaves some ranks none of the sequence."""
    config = {"sample.tokens": 12, "sample.temperature": 0.0, "sample.prompt": "the "}
    texts = [
        (
            Path(runs.train(world, (*plugins, "sample"), {**config, **more})[0]["run"]) / "artifacts/sample.txt"
        ).read_text()
        for world, plugins, more in ((1, (), {}), (2, ("tp",), TP2), (2, ("tp",), {**TP2, **WHOLE, **LOGITS}))
    ]
    assert len(set(texts)) == 1
    assert texts[0].startswith("the ")


@pytest.mark.parametrize(("world", "config"), [(2, TP2), (4, TP4)])
def test_sends_no_more_than_the_textbook(runs: Runs, world: int, config: Settings) -> None:
    """Two blocks per layer gather a sequence and scatter one, forward and backward; embedding and head do half."""
    batch, sequence, dim, layers = 12, 32, 64, 4
    config = {"decoder.dim": dim, "decoder.layers": layers, "train.micro_batch": batch, **config}
    reply = runs.train(world, ("tp",), config)[0]
    textbook = (8 * layers + 4) * batch * sequence * dim * 4 * (world - 1) / world
    sent = sum(reply["sent"][-1].values())
    print(f"tp{world}: {sent / textbook:.3f} of the textbook, {reply['sent'][-1]}")
    assert 0.9 < sent / textbook <= 1.05


def test_holds_a_share_of_the_weights(runs: Runs) -> None:
    """Norms alone are whole."""
    one = runs.one({})["parameter_bytes"]
    for reply in runs.train(2, ("tp",), TP2):
        assert reply["parameter_bytes"] == pytest.approx(one / 2, rel=0.01)


# -- sabotage and refusals --------------------------------------------------------------------------


def test_a_norm_left_unsynchronised_shows(runs: Runs) -> None:
    every = runs.train(2, ("tp",), TP2, sabotage="norm")
    with pytest.raises(AssertionError):
        compare(runs.one({}), every)
    wrong = [
        name
        for name, expected in runs.one({})["tensors"]["gradients"].items()
        if (every[0]["tensors"]["gradients"][name] - expected).abs().max() > 1e-3 * expected.abs().max()
    ]
    assert wrong == ["norm.weight"]


def test_the_wrong_order_is_refused(runs: Runs) -> None:
    with pytest.raises(PoolError, match="is sharded already"):
        runs.train(4, ("tp",), TP2, sabotage="order")


@pytest.mark.parametrize(
    ("partial", "same", "says"),
    [
        (True, True, "each of the 2 ranks computes its whole gradient"),
        (False, False, "its gradient differs between the 2 ranks"),
        (True, False, "[[3.0, 3.0], [3.0, 3.0]]"),
        (False, True, "[[1.0, 1.0], [1.0, 1.0]]"),
    ],
)
def test_the_first_step_judges_gradients_no_plan_speaks_of(ranks: Pool, partial: bool, same: bool, says: str) -> None:
    for said in ranks.run("tp_cases:judge", 2, partial=partial, same=same):
        assert says in said


@pytest.mark.parametrize(
    ("plugins", "config", "says"),
    [
        (("tp",), {"parallel.tp": 4}, "it has 2 heads of 8 features, and every rank needs whole ones; tp (4) must"),
        (("tp",), {**TP4, "decoder.hidden": 50}, "its 50 outputs can't be split evenly; tp (4) must divide them"),
        (("tp",), {**TP4, "tp.async_tp": True}, "tp.async_tp: needs CUDA devices with symmetric memory"),
        (("tp", "tp_cases:Unplanned"), {"parallel.tp": 4}, "declares no tensor_plan()"),
        ((), TP4, "parallel.tp is 4, but no enabled plugin covers the axis 'tp'"),
    ],
)
def test_refuses_in_one_message(runs: Runs, plugins: tuple[str, ...], config: Settings, says: str) -> None:
    with pytest.raises(PoolError) as error:
        runs.train(4, plugins, config)
    assert "rank 3 failed" in str(error.value)
    assert "ConfigError" in str(error.value)
    assert says in str(error.value)


# -- checkpoints --------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, tuple[str, ...], Settings]] = {
    "one": (1, (), {}),
    "tp2": (2, ("tp",), TP2),
    "tp4": (4, ("tp",), {"parallel.tp": 4}),
    "tp2 × dp2": (4, ("tp", "fsdp2"), TP2),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("before", "after"), [("tp2", "one"), ("one", "tp4"), ("tp2", "tp4"), ("tp2 × dp2", "tp2"), ("tp4", "tp2 × dp2")]
)
def test_goes_on_on_another_layout(
    runs: Runs, ranks: Pool, tmp_path: Path, before: str, after: str, tied: bool
) -> None:
    model = {"decoder.kv_heads": 4, "decoder.tied": tied}
    whole = runs.one(model)
    for layout, more in ((before, {"stop_at": 2}), (after, {})):
        world, plugins, config = LAYOUTS[layout]
        config = {"train.micro_batch": 2, **model, **config}
        arguments = {"folder": str(tmp_path), "plugins": plugins, "config": config, "steps": 5, "name": "run", **more}
        reply = ranks.run("cases:train", world, timeout=100, **arguments)[0]
    assert len(reply["grad_norms"]) in (2, 3)  # several ranks agree to stop one step later
    assert reply["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert reply["norms"] == pytest.approx(whole["norms"], rel=1e-5)

"""tp: models of others, evaluations, text, bytes sent, checkpoints, and what it refuses; test_compositions.py compares
forge's own model with one process."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from compositions import Composition
from crossed import few
from forge_train_tools.testing import Pool, PoolError, Verifier

pytestmark = [pytest.mark.dist]

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
        return self.ranks.run(
            "cases:train",
            world,
            keep=True,
            folder=str(folder),
            plugins=plugins,
            config={"train.micro_batch": 6, **config},
            **{"steps": 5, **more},
        )

    def one(self, config: Settings) -> dict[str, Any]:
        config = {key: value for key, value in config.items() if not key.startswith(LAYOUT)}
        key = json.dumps(config, sort_keys=True)
        if key not in self.known:
            (self.known[key],) = self.train(1, (), config)
        return self.known[key]


@pytest.fixture(scope="module")
def runs(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("tp"))


TP2, TP4 = {"parallel.tp": 2}, {"parallel.tp": 4, "decoder.kv_heads": 4}
WHOLE = {"tp.sequence_parallel": False}
LOGITS = {"tp.loss_parallel": False}
LOSS = {"cross_entropy.z_loss": 1e-2, "cross_entropy.label_smoothing": 0.1, "cross_entropy.chunk": 80}


@pytest.mark.parametrize("settings", [{}, WHOLE])
def test_splits_a_third_partys_model_and_its_unnamed_parameters(
    verify: Verifier, composition_file: Path, settings: Settings
) -> None:
    text = re.sub(r"\[decoder\].*?\n\n", "", composition_file.read_text(encoding="utf-8"), flags=re.DOTALL)
    file = composition_file.with_name("third.toml")
    file.write_text(text.replace('"decoder"', '"tp_cases:Third"'), encoding="utf-8")
    composition = Composition("tp2", "no ac", "one", "untied", "packed")
    verdict = verify(composition.request(file, **settings), 2, steps=2, reference=composition.reference(file))
    assert verdict.agree, verdict


@pytest.mark.parametrize("config", [pytest.param({}, marks=pytest.mark.extended), LOGITS, WHOLE])
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


@pytest.mark.parametrize(("world", "config"), few([(2, TP2), (4, TP4)], [(2, TP2)]))
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


# -- refusals ----------------------------------------------------------------------------------------------------------


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


REFUSED = [
    (("tp",), {"parallel.tp": 4}, "it has 2 heads of 8 features, and every rank needs whole ones; tp (4) must"),
    (("tp",), {**TP4, "decoder.hidden": 50}, "its 50 outputs can't be split evenly; tp (4) must divide them"),
    (("tp",), {**TP4, "tp.async_tp": True}, "tp.async_tp: needs CUDA devices with symmetric memory"),
    (("tp", "tp_cases:Unplanned"), {"parallel.tp": 4}, "declares no tensor_plan()"),
    ((), TP4, "parallel.tp is 4, but no enabled plugin covers the axis 'tp'"),
]
"""test_bad_layouts.py has the same refusals in CI, but for CUDA's."""


@pytest.mark.parametrize(
    ("plugins", "config", "says"),
    few(REFUSED, [one for one in REFUSED if "async_tp" in one[2]]),
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


@pytest.mark.parametrize(
    ("layouts", "tied"),
    few(
        list(
            itertools.product(
                [("one", "tp4"), ("tp2", "one"), ("tp2", "tp4"), ("tp2 × dp2", "tp2"), ("tp4", "tp2 × dp2")],
                [True, False],
            )
        ),
        [(("tp2", "one"), True), (("tp2 × dp2", "tp2"), False)],
    ),
)
def test_goes_on_on_another_layout(
    runs: Runs, ranks: Pool, tmp_path: Path, layouts: tuple[str, str], tied: bool
) -> None:
    before, after = layouts
    model = {"decoder.kv_heads": 4, "decoder.tied": tied}
    whole = runs.one(model)
    for layout, more in ((before, {"stop_at": 2}), (after, {})):
        world, plugins, config = LAYOUTS[layout]
        config = {"train.micro_batch": 3, **model, **config}
        arguments = {"folder": str(tmp_path), "plugins": plugins, "config": config, "steps": 5, "name": "run", **more}
        reply = ranks.run("cases:train", world, **arguments)[0]
    assert len(reply["grad_norms"]) in (2, 3)  # several ranks agree to stop one step later
    assert reply["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert reply["norms"] == pytest.approx(whole["norms"], rel=1e-5)

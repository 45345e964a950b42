"""Pipelines against one process: schedules, and what they meet.

CI takes those of the covering array in which each value occurs, and `make test-all` takes the array.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cases
import pipelines
import schedules
from compositions import SEED
from crossed import every_value, few, marked
from forge_train import ConfigError, ForgeError
from forge_train.checkpoint.checkpoint import found, shapes
from forge_train_tools.artifacts import recorded
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.opening import open_model
from forge_train_tools.testing import Pool, PoolError, Verifier, installed
from pipelines import Piped

pytestmark = [pytest.mark.dist]

Settings = Mapping[str, Any]


@pytest.mark.parametrize("piped", every_value(pipelines.covering(), pipelines.values, pipelines.cost), ids=str)
def test_all_pairs_agree_with_one_process(verify: Verifier, composition_file: Path, piped: Piped) -> None:
    reference = piped.reference(composition_file)
    verdict = verify(piped.request(composition_file), piped.world, steps=2, reference=reference)
    assert verdict.agree, f"seed {SEED}: {verdict}"


def test_compiled_units_agree(verify: Verifier, composition_file: Path) -> None:
    piped = Piped("1f1b", extras=frozenset({"tied"}))
    right = piped.reference(composition_file)
    request = piped.request(composition_file, **{"compile.backend": "aot_eager"})
    verdict = verify(replace(request, plugins=(*request.plugins, "compile")), 2, steps=2, reference=right)
    assert verdict.agree, verdict


@pytest.mark.parametrize("schedule", pipelines.SPLIT)
@pytest.mark.parametrize(
    ("plugin", "settings", "says"),
    [
        ("compile", {"compile.backend": "aot_eager"}, "gradients of .* apart, and a compiled unit brings both at once"),
        ("ac", {"ac.mode": "selective"}, "runs backward several times .* set ac.mode to full, or take a schedule"),
    ],
)
def test_split_schedules_refuse_what_computes_both_gradients_at_once(
    composition_file: Path, schedule: str, plugin: str, settings: Settings, says: str
) -> None:
    """Before any rank starts: one alone may hold such a unit."""
    request = Piped(schedule).request(composition_file, **settings)
    with pytest.raises(ConfigError, match=f"{schedule} .*{says}"):
        resolve(replace(request, plugins=(*request.plugins, plugin)), world=2)


@pytest.mark.parametrize("schedule", marked(pipelines.SPLIT, ["interleaved_zero_bubble", "zbv"]))
def test_split_schedules_agree_where_weights_share_nodes(
    verify: Verifier, composition_file: Path, schedule: str
) -> None:
    """The last part has the tied embedding in its head and in each module of multi-token prediction."""
    extras = frozenset({"tied", "ac", "experts"})
    request = Piped(schedule, extras=extras).request(composition_file, **{"mtp.depths": 2})
    right = Piped(schedule, extras=extras).reference(composition_file, **{"mtp.depths": 2})
    request, right = (replace(one, plugins=(*one.plugins, "mtp")) for one in (request, right))
    verdict = verify(request, 2, steps=2, reference=right)
    assert verdict.agree, verdict


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        pytest.param("1f1b", {"train.precision": "bf16"}, marks=pytest.mark.extended),
        ("dualpipe_v", {"train.precision": "bf16"}),
        ("zbv", {"pp.cuts": ["layers.0", "layers.2", "norm"]}),
        ("1f1b", {"train.batch_warmup": "[{ steps = 1, global_batch = 4 }]"}),
    ],
    ids=["bf16", "bf16, split", "cuts", "growing batches"],
)
def test_options_agree(verify: Verifier, composition_file: Path, schedule: str, settings: Settings) -> None:
    piped = Piped(schedule)
    own = {key: value for key, value in settings.items() if key.startswith("train.")}
    right = piped.reference(composition_file, **own)
    verdict = verify(piped.request(composition_file, **settings), 2, steps=2, reference=right)
    assert verdict.agree, verdict


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_each_gradient_of_an_eight_bit_product_is_computed_once(ranks: Pool, tmp_path: Path, schedule: str) -> None:
    """Autograd calls the function in both halves of a split backward pass."""
    counts = ranks.run("pipeline_counts:products_of", 2, folder=str(tmp_path), schedule=schedule)
    for one in counts:
        assert one["forward"] > 0
        assert one["inputs"] == one["weights"] == one["forward"]


@pytest.mark.parametrize("schedule", marked(["zbv", "looped_bfs"], ["zbv"]))
def test_one_process_takes_the_same_configuration(verify: Verifier, composition_file: Path, schedule: str) -> None:
    """With `parallel.pp = 1` there is one part, whatever the schedule has."""
    assert verify(Piped(schedule).request(composition_file), 2, steps=2).agree


def test_what_a_pipeline_trained_is_opened_as_a_whole(ranks: Pool, tmp_path: Path) -> None:
    run = Path(train(ranks, tmp_path / "runs", "pp2")[0]["run"])
    with installed([cases.Probe]):
        opened = open_model(found(run / "checkpoints")[0].path)
    assert opened.job.hooks.provider("executor") == "sequential", "which the pipeline had displaced"


def test_a_run_keeps_the_picture_of_its_step(ranks: Pool, tmp_path: Path) -> None:
    run = Path(train(ranks, tmp_path / "runs", "pp2, two parts")[0]["run"])
    assert {one.path: one.plugin for one in recorded(run)}["artifacts/pipeline.svg"] == "pp"
    tree = ET.parse(run / "artifacts" / "pipeline.svg")
    title, *boxes = (one.text for one in tree.iter("{http://www.w3.org/2000/svg}title"))
    assert title == "zbv on 2 ranks, 4 micro-batches"
    table = schedules.timetable("ZBVZeroBubble", 2, 4)
    assert set(map(str, boxes)) == {str(slot) for row in table.ranks for slot in row if slot}, "some in two lines"


def test_what_was_tied_is_not_resumed_untied(ranks: Pool, tmp_path: Path) -> None:
    train(ranks, tmp_path / "runs", "pp2", stop_at=2)
    untied = ["decoder.tied=false"]
    with pytest.raises(PoolError, match=r"decoder\.tied: True in the checkpoint, False now\nIf that is meant"):
        train(ranks, tmp_path / "runs", "one", sets=untied)
    with pytest.raises(PoolError, match=r"holds another model:\n  head\.weight: absent in the checkpoint, \d+ × 32 in"):
        train(ranks, tmp_path / "runs", "one", sets=[*untied, 'checkpoint.allow_changes=["decoder.tied"]'])


# -- planted faults ---------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[str, str, Piped, set[str], str]] = {
    # Name: the plugin, whose place it takes, where, what differs among others, what is said of it.
    "a micro-batch's gradient is lost": (
        "Dropping", "pp", Piped("1f1b"), {"gradients", "grad_norm"}, r"layers\.2\..* wrong: a contribution is missing",
    ),
    "the tie's sum is left out": (
        "Untied", "pp", Piped("1f1b", extras=frozenset({"tied"})),
        {"gradients", "grad_norm"}, r"the embedding \(embedding\.weight\) are wrong",
    ),
    "a copy is stale": (
        "Stale", "pp", Piped("1f1b", extras=frozenset({"tied"})),
        {"later gradients"}, r"a later step of all parameters are wrong",
    ),
    "biases of a stage move twice": (
        "BiasTwice", "moe", Piped("1f1b", extras=frozenset({"experts"})), {"buffers"}, r"bias",
    ),
}  # fmt: skip


def faulty(asked: Request, plugin: str, instead: str) -> Request:
    named, own = f"pipeline_sabotage:{plugin}", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", plugin).lower()
    plugins = tuple(named if one == instead else one for one in asked.plugins)
    return replace(asked, plugins=plugins, set=tuple(re.sub(rf"^{instead}\.", f"{own}.", one) for one in asked.set))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(verify: Verifier, composition_file: Path, name: str) -> None:
    plugin, instead, piped, parts, says = FAULTS[name]
    right = None if instead == "moe" else piped.reference(composition_file)  # one process needs their routers, too
    verdict = verify(faulty(piped.request(composition_file), plugin, instead), piped.world, steps=3, reference=right)
    assert parts <= verdict.failed, verdict
    assert re.search(says, verdict.advice[0]), verdict.advice


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("fsdp2", r"pp: the weights of part \d were exchanged between the two halves"),
        ("zero1", r"The optimizer holds a parameter twice, or one that is not the model's"),
    ],
)
def test_weights_dropped_between_two_halves_are_told(
    verify: Verifier, composition_file: Path, data: str, says: str
) -> None:
    piped = Piped("zbv", data=data)
    with pytest.raises(ForgeError, match=says):
        verify(
            faulty(piped.request(composition_file), "Resharding", "pp"),
            piped.world,
            steps=1,
            reference=piped.reference(composition_file),
        )


# -- checkpoints ------------------------------------------------------------------------------------------------------

TRAINED = {"decoder.layers": 3, "decoder.tied": True, "moe.experts": 4, "moe.hidden": 16}
PLACES: dict[str, tuple[int, tuple[str, ...], Settings]] = {
    "one": (1, (), {}),
    "pp2": (2, ("pp",), {"parallel.pp": 2}),
    "pp2, two parts": (2, ("pp",), {"parallel.pp": 2, "pp.schedule": "zbv"}),
    "pp4": (4, ("pp",), {"parallel.pp": 4}),
    "pp2 × dp2": (4, ("pp", "fsdp2"), {"parallel.pp": 2, "pp.schedule": "interleaved_1f1b"}),
    "tp2 × dp2": (4, ("tp", "fsdp2"), {"parallel.tp": 2}),
    "ep2 × dp2, zero1": (4, ("ep", "zero1"), {"parallel.ep": 2}),
}


def train(ranks: Pool, folder: Path, place: str, **more: Any) -> list[dict[str, Any]]:
    world, plugins, config = PLACES[place]
    folder.mkdir(exist_ok=True)
    arguments = {"folder": str(folder), "plugins": ("moe", *plugins), "config": {**TRAINED, **config}, "steps": 4}
    replies: list[dict[str, Any]] = ranks.run("cases:train", world, name="run", **arguments, **more)
    return replies


@pytest.fixture(scope="module")
def whole(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run that nothing interrupts, on one process."""
    return train(ranks, tmp_path_factory.mktemp("whole"), "one")[0]


@pytest.mark.parametrize(
    ("before", "after"),
    few(
        [
            *(("one", "pp2, two parts"), ("pp2, two parts", "tp2 × dp2"), ("tp2 × dp2", "pp4")),
            *(("pp4", "ep2 × dp2, zero1"), ("ep2 × dp2, zero1", "pp2 × dp2"), ("pp2 × dp2", "one")),
        ],
        [("pp2, two parts", "tp2 × dp2"), ("pp2 × dp2", "one")],
    ),
)
def test_goes_on_elsewhere(ranks: Pool, tmp_path: Path, whole: dict[str, Any], before: str, after: str) -> None:
    train(ranks, tmp_path / "runs", before, stop_at=2)
    resumed = train(ranks, tmp_path / "runs", after)
    names = [name for reply in resumed for name in reply["weights"]]
    assert set(names) == set(whole["weights"]), "every weight, a tied one under its first name"
    for reply in resumed:
        assert reply["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert reply["norms"] == pytest.approx(whole["norms"], rel=1e-5)


def test_repeats_bit_for_bit(ranks: Pool, tmp_path: Path) -> None:
    uninterrupted = train(ranks, tmp_path / "uninterrupted", "pp2, two parts")
    train(ranks, tmp_path / "resumed", "pp2, two parts", stop_at=2)
    resumed = train(ranks, tmp_path / "resumed", "pp2, two parts")
    for what in ("losses", "norms", "weights"):
        assert [one[what] for one in resumed] == [one[what] for one in uninterrupted]
    held = shapes(found(Path(resumed[0]["run"]) / "checkpoints")[0].path)
    assert "model.embedding.weight" in held
    assert "model.head.weight" not in held, "a copy is in no checkpoint"

"""Adapters by an outside plugin: gradients beside split weights, weights to start from, what a checkpoint holds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import cases
from compositions import Composition
from crossed import marked
from forge_train.checkpoint.checkpoint import found, shapes
from forge_train_tools.offline.opening import open_model
from forge_train_tools.testing import Pool, PoolError, Verifier

pytestmark = [pytest.mark.dist]

WHOLE = {"tp.sequence_parallel": False, "tp.loss_parallel": False}


@pytest.fixture(scope="module")
def adapted_file(composition_file: Path) -> Path:
    """The built-in decoder with adapters."""
    file = composition_file.with_name("adapted.toml")
    text = composition_file.read_text(encoding="utf-8")
    file.write_text(text.replace('"decoder",', '"decoder", "adapter_cases:Adapters",'), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("layout", "world", "settings"),
    [
        ("tp2", 2, {}),
        pytest.param("tp2", 2, {"adapters.split": False}, marks=pytest.mark.extended),
        pytest.param("tp2", 2, WHOLE, marks=pytest.mark.extended),
        ("tp2", 2, {**WHOLE, "adapters.split": False, "adapters.frozen": False}),
        pytest.param("tp2×dp2", 4, {}, marks=pytest.mark.extended),
    ],
)
def test_gradients_beside_split_weights_equal_one_process(
    verify: Verifier, adapted_file: Path, layout: str, world: int, settings: dict[str, object]
) -> None:
    """Loss, and the gradient of every parameter."""
    composition = Composition(layout, "no ac", "one", "untied", "packed")
    own = {key: value for key, value in settings.items() if key.startswith("adapters.")}
    reference = composition.reference(adapted_file, **own)
    verdict = verify(composition.request(adapted_file, **settings), world, steps=2, reference=reference)
    assert verdict.agree, verdict


def test_a_module_says_itself_what_its_gradients_are(verify: Verifier, adapted_file: Path) -> None:
    """And is believed: what it says here is wrong."""
    composition = Composition("tp2", "no ac", "one", "untied", "packed")
    wrong = {"adapters.declared": True}
    right = composition.reference(adapted_file, **wrong)
    verdict = verify(composition.request(adapted_file, **wrong), 2, steps=2, reference=right)
    assert not verdict.agree
    assert "lora" in str(verdict)


@pytest.mark.parametrize(
    ("partial", "same", "says"), [(True, True, "is the same on"), (False, False, "differs between")]
)
def test_an_added_gradient_that_is_not_as_expected_is_refused(
    ranks: Pool, partial: bool, same: bool, says: str
) -> None:
    for reply in ranks.run("tp_cases:judge", 2, partial=partial, same=same, added=True):
        assert f"'weight' was added to the model, and its gradient {says} the 2 ranks" in reply
        assert f"partial_gradients = {not partial}" in reply


# -- weights to start from, and what a checkpoint holds ----------------------------------------------------------------

SHARDINGS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "one": (1, (), {}),
    "fsdp2": (2, ("fsdp2",), {}),
    "ddp": (2, ("ddp",), {"parallel.dp_replicate": 2, "noise.scale": 0.0}),
    "zero1": (2, ("zero1",), {}),
}
ADDED = ["*.lora_*"]


def train(ranks: Pool, folder: Path, sharding: str = "one", **more: Any) -> list[dict[str, Any]]:
    world, plugins, config = SHARDINGS[sharding]
    folder.mkdir(exist_ok=True)
    plugins, config = (*plugins, *more.pop("plugins", ())), {**config, **more.pop("config", {})}
    arguments = {"folder": str(folder), "plugins": plugins, "config": config, **more}
    replies: list[dict[str, Any]] = ranks.run("adapter_cases:adapted", world, keep=True, **arguments)
    return replies


def newest(reply: dict[str, Any]) -> Path:
    return found(Path(reply["run"]) / "checkpoints")[0].path


@pytest.fixture(scope="module")
def base(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tower without adapters."""
    return newest(train(ranks, tmp_path_factory.mktemp("base"), adapters=False, steps=2)[0])


def start(base: Path, **more: Any) -> dict[str, Any]:
    return {"train.init_from": str(base), "train.init_missing": ADDED, "checkpoint.only": ADDED, **more}


@pytest.mark.parametrize("sharding", marked(SHARDINGS, ["ddp"]))
def test_starts_from_a_base_keeps_adapters_alone_and_goes_on_bit_for_bit(
    ranks: Pool, tmp_path: Path, base: Path, sharding: str
) -> None:
    whole = train(ranks, tmp_path / "whole", sharding, config=start(base), name="run")
    train(ranks, tmp_path / "stopped", sharding, config=start(base), name="run", stop_at=2)
    resumed = train(ranks, tmp_path / "stopped", sharding, config=start(base), name="run")
    for one, other in zip(resumed, whole, strict=True):
        for key in ("losses", "norms", "weights"):
            assert one[key] == other[key], key
    held = {name.removeprefix("model.") for name in shapes(newest(whole[0])) if name.startswith("model.")}
    assert held == set(whole[0]["trained"])
    assert all(".lora_" in name for name in held)
    (event,) = [one for one in whole[0]["events"] if one["event"] == "initialised"]
    assert (event["missing"], event["unexpected"]) == (sorted(held), [])
    assert event["checkpoint"] == str(base)
    opened = open_model(newest(resumed[0]), text=False).model
    assert {name: cases.digest(tensor) for name, tensor in opened.state_dict().items()} == whole[0]["weights"]


@pytest.mark.parametrize("sharding", marked([name for name in SHARDINGS if name != "one"], ["zero1"]))
def test_frozen_parameters_have_no_gradients_and_no_optimizer_state(
    ranks: Pool, tmp_path: Path, base: Path, sharding: str
) -> None:
    config = {"noise.scale": 0.0}
    alone = train(ranks, tmp_path / "one", config=start(base, **config))[0]
    for reply in train(ranks, tmp_path / "two", sharding, config=start(base, **config)):
        assert reply["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert reply["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert reply["gradient_bytes"] == reply["trained_bytes"] > 0
        assert reply["optimizer_bytes"] == 2 * reply["trained_bytes"]
        assert len(reply["weights"]) > len(reply["trained"])


def test_goes_on_on_another_layout_and_starts_a_run_without_its_base(ranks: Pool, tmp_path: Path, base: Path) -> None:
    """A checkpoint of adapters knows what lies beneath it; left-over names are named."""
    config = start(base, **{"noise.scale": 0.0})
    whole = train(ranks, tmp_path / "whole", config=config, name="run")[0]
    train(ranks, tmp_path / "stopped", config=config, name="run", stop_at=2)
    resumed = train(ranks, tmp_path / "stopped", "fsdp2", config=config, name="run")[0]
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    still = {"adamw.lr": 1e-12, "adamw.weight_decay": 0.0, "noise.scale": 0.0}
    source = {"train.init_from": str(newest(whole))}
    same = train(ranks, tmp_path / "same", config={**source, **still}, steps=1)[0]
    left = {**source, "train.init_unexpected": ADDED, **still}
    plain = train(ranks, tmp_path / "plain", config=left, steps=1, adapters=False)[0]
    untouched = train(ranks, tmp_path / "base", config={"train.init_from": str(base), **still}, steps=1, adapters=False)
    assert same["losses"][0] != plain["losses"][0] == untouched[0]["losses"][0]
    (event,) = [one for one in plain["events"] if one["event"] == "initialised"]
    assert event["unexpected"] == sorted(whole["trained"])


def test_another_base_is_refused_at_resume_and_a_copy_is_not(ranks: Pool, tmp_path: Path, base: Path) -> None:
    train(ranks, tmp_path / "runs", config=start(base), name="run", stop_at=2)
    other = newest(train(ranks, tmp_path / "other", adapters=False, steps=1)[0])
    with pytest.raises(
        PoolError, match=r"holds a part of the weights, and the others are those of .*; .* holds others"
    ):
        train(ranks, tmp_path / "runs", config=start(other), name="run")
    copy = shutil.copytree(base, tmp_path / "copy")
    assert len(train(ranks, tmp_path / "runs", config=start(copy), name="run")[0]["losses"]) == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train.init_missing": []}, r"holds another model:\s+head\.lora_down: absent in the checkpoint"),
        (
            {"train.init_missing": [*ADDED, "*.nothing"]},
            r"train\.init_missing: '\*\.nothing' fits nothing that .* lacks",
        ),
        ({"train.init_unexpected": ["x"]}, r"train\.init_unexpected: 'x' fits nothing that .* holds beside the model"),
        ({"checkpoint.only": ["*.lora_up"]}, r"checkpoint\.only leaves out .* and \d+ more, which this run trains"),
        ({"checkpoint.only": [*ADDED, "x"]}, r"checkpoint\.only: 'x' fits nothing that is a parameter of this model"),
        (
            {"train.init_from": "", "train.init_missing": []},
            r"checkpoint\.only: needs a checkpoint .* set train\.init_from",
        ),
        ({"train.init_from": "", "checkpoint.only": []}, r"train\.init_missing: needs a checkpoint"),
    ],
)
def test_patterns_and_filters_that_do_not_fit_are_refused(
    ranks: Pool, tmp_path: Path, base: Path, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(PoolError, match=says):
        train(ranks, tmp_path, config=start(base, **change), steps=1)


def test_a_run_that_saved_everything_does_not_begin_to_save_less(ranks: Pool, tmp_path: Path, base: Path) -> None:
    train(ranks, tmp_path, config=start(base, **{"checkpoint.only": []}), name="run", stop_at=2)
    with pytest.raises(PoolError, match="continues from checkpoints that hold all weights"):
        train(ranks, tmp_path, config=start(base), name="run")

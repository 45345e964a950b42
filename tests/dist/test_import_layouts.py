"""A run starts straight from a folder in Hugging Face layout, on any layout: same weights, no byte too many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from forge_train import ConfigError
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.testing import Pool, RunForge
from import_cases import started

pytestmark = [pytest.mark.dist]

LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "fsdp2 ×4": (4, ("fsdp2",), {}),
    "tp2 × fsdp2 ×2": (4, ("fsdp2", "tp"), {"parallel.tp": 2}),
    "pp2": (2, ("pp",), {"parallel.pp": 2}),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from forge_train_tools.testing import run_forge

    folder = tmp_path_factory.mktemp("from")
    run = run_forge((), {"decoder.tied": False, "adamw.lr": 1e-2}, steps=1, folder=folder / "runs")
    export_checkpoint(run.run, folder / "hf", shard_bytes=20_000)
    return folder / "hf"


@pytest.fixture(scope="module")
def alone(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, from a checkpoint that the folder was imported as."""
    folder = tmp_path_factory.mktemp("alone")
    import_checkpoint(hf, folder / "start")
    return started(str(folder), str(folder / "start"), (), {"decoder.tied": False})


def stored(hf: Path) -> int:
    return sum(tensor.nbytes for file in hf.glob("*.safetensors") for tensor in load_file(file).values())


def test_one_process_reads_each_byte_once(hf: Path, alone: dict[str, Any], tmp_path: Path) -> None:
    straight = started(str(tmp_path), str(hf), (), {"decoder.tied": False})
    assert straight["before"] == alone["before"]
    assert straight["loss"] == alone["loss"]
    assert (straight["read"], alone["read"]) == (stored(hf), 0)
    events = [json.loads(line) for line in (Path(straight["run"]) / "events.jsonl").read_text().splitlines()]
    (event,) = [one for one in events if one["event"] == "initialised"]
    assert event["checkpoint"] == str(hf)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_read_what_their_shards_are_made_of(
    ranks: Pool, layout: str, hf: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    world, plugins, config = LAYOUTS[layout]
    config = {"decoder.tied": False, **config}
    replies = ranks.run(
        "import_cases:started", world, folder=str(tmp_path), source=str(hf), plugins=plugins, config=config
    )
    before = {name: digest for reply in replies for name, digest in reply["before"].items()}
    assert before == alone["before"]
    assert replies[0]["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    read = [reply["read"] for reply in replies]
    twice = 0 if "tp" not in plugins else norms(hf)
    assert sum(read) == stored(hf) + twice
    assert max(read) < 0.8 * stored(hf)


def norms(hf: Path) -> int:
    """Bytes of what tensor parallelism replicates."""
    files = [load_file(file) for file in hf.glob("*.safetensors")]
    return sum(tensor.nbytes for file in files for name, tensor in file.items() if "norm" in name)


@pytest.mark.parametrize("source", ["hf", "start"])
def test_a_map_is_read_through_shard_by_shard(
    ranks: Pool, hf: Path, alone: dict[str, Any], tmp_path: Path, source: str
) -> None:
    """Half of the layers, and 300 token ids."""
    maps = "Renumber('layers.{i}.{rest*}', (1,)) | Resize(('embedding.weight', 'head.weight'), 257, 300)"
    (tmp_path / "maps.py").write_text(f"from forge_train_kit.state_map import *\nMAP = {maps}\n")
    where = str(hf if source == "hf" else Path(alone["run"]).parent / "start")
    config = {"decoder.tied": False, "decoder.layers": 1, "decoder.vocabulary": 300}
    config["train.init_map"] = f"{tmp_path}/maps.py:MAP"
    one = started(str(tmp_path), where, (), config)
    replies = ranks.run(
        "import_cases:started", 2, folder=str(tmp_path), source=where, plugins=("fsdp2",), config=config
    )
    assert {name: digest for reply in replies for name, digest in reply["before"].items()} == one["before"]
    assert replies[0]["loss"] == pytest.approx(one["loss"], rel=1e-5)
    layer = sum(one.nbytes for file in hf.glob("*.safetensors") for n, one in load_file(file).items() if ".0." in n)
    assert one["read"] == sum(reply["read"] for reply in replies) == stored(hf) - layer
    assert max(reply["read"] for reply in replies) < 0.6 * one["read"]


def test_values_that_no_shape_tells_of_are_warned_of(
    hf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started(str(tmp_path), str(hf), (), {"decoder.tied": False, "decoder.norm_eps": 0.5, "decoder.rope.theta": 7.0})
    told = [record.getMessage() for record in caplog.records if "config.json" in record.getMessage()]
    assert told == [
        f"{hf}/config.json: decoder.norm_eps is 1e-06 there, and 0.5 in this run",
        f"{hf}/config.json: decoder.rope.theta is 10000.0 there, and 7.0 in this run",
    ]


def test_a_model_that_no_file_could_describe_may_begin_with_weights_of_one(
    hf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"decoder.tied": False, "decoder.residual_multiplier": 0.5, "decoder.logit_soft_cap": 5.0}
    started(str(tmp_path), str(hf), (), config)
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING" and str(hf) in one.getMessage()]
    assert said.startswith(f"{hf}/config.json describes another model: ")
    assert "decoder.residual_multiplier is 0.5 here, but 1.0 there" in said


def test_weights_that_may_differ_are_named(hf: Path, run_forge: RunForge) -> None:
    config = {"decoder.tied": False, "train.init_from": str(hf), "train.init_missing": ["*.nothing"]}
    with pytest.raises(ConfigError, match=r"train\.init_missing: '\*\.nothing' fits nothing that .*hf lacks"):
        run_forge((), config, steps=1)
    with pytest.raises(ConfigError, match=r"257 × 32 in model-.*, 257 × 64 in this run's configuration"):
        run_forge((), {"decoder.tied": False, "train.init_from": str(hf), "decoder.dim": 64}, steps=1)
    with pytest.raises(ConfigError, match=r"checkpoint\.only needs a checkpoint .* forge checkpoint import .*hf NEW"):
        run_forge((), {"decoder.tied": False, "train.init_from": str(hf), "checkpoint.only": ["embedding.*"]}, steps=1)


def test_weights_that_the_folder_lacks_may_keep_their_initial_values(hf: Path, run_forge: RunForge) -> None:
    config = {"decoder.tied": False, "train.init_from": str(hf), "decoder.layers": 3}
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.input_layernorm\.weight: missing"):
        run_forge((), config, steps=1)
    run = run_forge((), {**config, "train.init_missing": ["layers.2.*"]}, steps=1)
    (event,) = [one for one in run.events if one["event"] == "initialised"]
    assert event["missing"]
    assert {name.split(".")[1] for name in event["missing"]} == {"2"}

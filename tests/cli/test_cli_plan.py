"""`forge plan`: what it finds without allocating agrees with what a run has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_command import Forge

TRANSFORMS = '''
from forge_train import Applied, Phase, Plugin, Transform, hookimpl

class Mark(Plugin):
    """Marks attention modules."""
    api = (1, 0)

    @hookimpl
    def parallelize(self, job):
        def apply(part):
            names = tuple(name for name, _ in part.named_modules() if name.endswith("attention"))
            return Applied(part, names, "marked")
        return Transform(Phase.RECOMPUTE, "mark", apply)

class Idle(Plugin):
    """Has nothing to do."""
    api = (1, 0)

    @hookimpl
    def parallelize(self, job):
        return None

class Rows(Plugin):
    """Data that says nothing of its batches."""
    api = (1, 0)

    @hookimpl
    def build_data(self, job, split):
        raise AssertionError("a plan opens no data")

class Documents(Rows):
    """Data that does."""

    @hookimpl
    def example_batch(self, job):
        import torch
        from forge_train import Batch
        train = job.config.train
        ids = torch.zeros(train.micro_batch, train.sequence, dtype=torch.int64)
        return Batch(ids, ids, document_ids=ids)

class Refusing(Plugin):
    """An executor that can't run this model."""
    api = (1, 0)

    @hookimpl
    def executor(self, model, task, job):
        from forge_train import ConfigError
        raise ConfigError("this executor wants several parts")

class Curious(Plugin):
    """A loss that reads values."""
    api = (1, 0)

    @hookimpl
    def loss(self, job):
        def loss(hidden, head, labels):
            return head(hidden).sum() / float(hidden.sum())
        return loss

class Reader(Plugin):
    """An optimizer that reads values, as no fake tensor can."""
    api = (1, 0)

    @hookimpl
    def optimizer(self, model, job):
        import torch

        class Sum(torch.optim.SGD):
            def step(self, closure=None):
                float(next(iter(model.parameters())).sum())

        return Sum(model.parameters(), lr=1e-3)
'''


FOUR = ("-s", "train.global_batch=4")


@pytest.fixture
def plugins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "plan_plugins.py").write_text(TRANSFORMS)
    monkeypatch.syspath_prepend(str(folder))


_made: dict[tuple[str, ...], str] = {}


def planned(forge: Forge, *arguments: str) -> Any:
    """A plan; the same one is made once, as it takes seconds."""
    if arguments not in _made:
        _made[arguments] = forge("plan", "tiny.toml", "--json", *arguments).out
    return json.loads(_made[arguments])


def test_nothing_is_written(forge: Forge, folder: Path) -> None:
    before = set(folder.iterdir())
    forge("plan", "tiny.toml")
    assert set(folder.iterdir()) == before


def test_the_keys(forge: Forge) -> None:
    plan = planned(forge)
    assert {"phases", "meshes", "parameters", "memory", "communication", "flops_per_token"} <= plan.keys()
    assert plan["phases"] == plan["communication"] == []
    assert plan["meshes"] == {"dense": {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}}
    assert plan["slots"]["optimizer"] == ["adamw"]
    assert plan["flops_per_token"] > 0


def test_the_parameters_are_those_of_the_run(forge: Forge, folder: Path) -> None:
    from forge_train.checkpoint import checkpoint

    counts = planned(forge)["parameters"]
    forge("train", "tiny.toml", "--name", "mine", "-q")
    saved = checkpoint.shapes(checkpoint.resolve(folder / "runs" / "mine"))
    names = [name for name in saved if name.startswith("model.")]
    assert counts["total"] == counts["trainable"] == sum(torch.Size(saved[name][0]).numel() for name in names)
    assert sum(counts["by_module"].values()) == counts["total"]
    assert counts["tied"] == []


@pytest.mark.slow
def test_tied_parameters_count_once(forge: Forge) -> None:
    loose, tied = planned(forge)["parameters"], planned(forge, "-s", "decoder.tied=true")["parameters"]
    assert tied["tied"] == [["embedding.weight", "head.weight"]]
    assert loose["total"] - tied["total"] == loose["by_module"]["head"]
    cut = ("-s", "decoder.tied=true", "--world", "2", "-p", "pp", "-s", "parallel.pp=2", "-s", "train.micro_batch=1")
    apart = planned(forge, *cut)["parameters"]
    assert apart["trainable"] == apart["total"] == tied["total"]


@pytest.mark.parametrize(("optimizer", "per_parameter"), [("adamw", 8), ("lion", 4)])
def test_memory(forge: Forge, optimizer: str, per_parameter: int) -> None:
    plan = planned(forge, "-p", optimizer)
    memory, count = plan["memory"], plan["parameters"]["total"]
    assert memory["parameters"] == memory["gradients"] == 4 * count
    assert memory["optimizer"] == pytest.approx(per_parameter * count, rel=0.02)  # and a step count here and there
    held = memory["parameters"] + memory["buffers"] + memory["optimizer"]
    assert held + memory["gradients"] < memory["peak"] <= held + memory["gradients"] + memory["activations"]
    assert 0 < memory["logits"] < memory["activations"]
    assert memory["notes"] == []


def test_activations_grow_with_the_micro_batch(forge: Forge) -> None:
    one, two = (planned(forge, "-s", f"train.micro_batch={size}")["memory"]["activations"] for size in (1, 2))
    assert one > 0
    assert two == pytest.approx(2 * one, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        pytest.param("zero1", "fp32", marks=pytest.mark.extended),
        ("fsdp2,tp", "bf16"),
        pytest.param("fsdp2", "bf16", marks=pytest.mark.extended),
        pytest.param("fsdp2", "fp32", marks=pytest.mark.extended),
        pytest.param("zero1", "bf16", marks=pytest.mark.extended),
        pytest.param("fsdp2,tp", "fp32", marks=pytest.mark.extended),
    ],
)
def test_unsharded_gradients_are_no_activations(forge: Forge, layout: str, precision: str) -> None:
    """What waits for the last micro-batch is all of this rank in fp32; activations are those of one micro-batch."""
    tp = 2 if "tp" in layout else 1
    options = ("-p", layout, "--world", str(2 * tp), "-s", f"parallel.tp={tp}", "-s", "train.micro_batch=1")
    options += ("-s", f"train.precision={precision}", "-s")
    one, four = (planned(forge, *options, f"train.global_batch={2 * times}") for times in (1, 4))
    assert one["memory"]["unsharded"] == 0
    # Of tp's two shares, FSDP2 holds halves; rows that it adds to the vocabulary to halve it have no gradient.
    expected = 2 * four["memory"]["parameters"] if tp == 2 else 4 * four["parameters"]["total"]
    assert four["memory"]["unsharded"] == expected
    assert four["memory"]["activations"] == pytest.approx(one["memory"]["activations"], rel=0.01)
    assert four["memory"]["peak"] > four["memory"]["parameters"] + expected
    shown = [forge("plan", "tiny.toml", *options, f"train.global_batch={size}").out for size in (2, 8)]
    assert ["unsharded gradients" in text for text in shown] == [False, True]


def test_what_can_t_be_known_is_said(forge: Forge, plugins: None) -> None:
    memory = planned(forge, "-p", "plan_plugins:Reader")["memory"]
    assert memory["optimizer"] is None
    assert "not known before it is allocated" in memory["notes"][0]
    assert "not known" in forge("plan", "tiny.toml", "-p", "plan_plugins:Reader").out


@pytest.mark.slow
def test_a_step_that_can_t_be_taken_leaves_the_rest(
    forge: Forge, plugins: None, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("-p", "plan_plugins:Curious", "--world", "2", *FOUR, "--device", "h100")
    plan = planned(forge, *options)
    memory = plan["memory"]
    assert memory["gradients"] == memory["parameters"] > 0
    assert memory["optimizer"] >= 2 * memory["parameters"]
    assert memory["activations"] is memory["logits"] is memory["peak"] is plan["roofline"] is None
    assert plan["communication"] == []
    (note,) = memory["notes"]
    assert note.startswith("activations and communication: not known before it is allocated (DataDependentOutput")
    assert "fake" not in caplog.text
    assert note in forge("plan", "tiny.toml", *options).out


def test_phases_idle_plugins_and_slots(forge: Forge, plugins: None) -> None:
    options = ("-p", "plan_plugins:Mark,plan_plugins:Idle,lion")
    plan = planned(forge, *options)
    entry = {
        "phase": "RECOMPUTE",
        "slot": "mark",
        "plugin": "mark",
        "matched": ["layers.0.attention"],
        "note": "marked",
    }
    assert plan["phases"] == [entry]
    assert plan["idle"] == ["idle"]
    text = forge("plan", "tiny.toml", *options).out
    assert "1: layers.0.attention" in text
    assert "Idle at this size: idle" in text
    assert "in place of adamw" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--world", "2", "-s", "parallel.tp=2"], "parallel.tp is 2, but no enabled plugin covers the axis 'tp'"),
        (["--world", "2", "-p", "fsdp2", "-s", "parallel.cp=2"], "no enabled plugin covers the axis 'cp'"),
        (["--world", "2", "-s", "parallel.dp_shard=1"], "there are 2 processes"),
        (["--world", "3"], "train.global_batch"),
        (["--world", "4", "-p", "tp", "-s", "parallel.tp=4"], "tp (4) must divide"),
        (["--world", "4", "-p", "ddp,tp", "-s", "parallel.tp=2"], "use fsdp2 instead of ddp"),
        (["--world", "2", "-p", "ddp,zero1", *FOUR], "'ddp' and 'zero1' both fill the slot 'data_parallel'"),
        (["--world", "2", "-s", "parallel.ep=3"], "parallel.ep: must divide"),
        (["--world", "0"], "--world"),
        (["--world", "2", "--nodes", "3", *FOUR], "2 ranks can't be spread evenly over 3 nodes"),
        (["--device", "h1000"], "Did you mean 'h100'?"),
        (["-s", "decoder.heads=3"], "decoder.heads"),
    ],
)
def test_mistakes(forge: Forge, arguments: list[str], says: str) -> None:
    assert says in forge("plan", "tiny.toml", *arguments, fails=2).err
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_what_a_run_would_be_refused_for(forge: Forge, plugins: None) -> None:
    told = forge("plan", "tiny.toml", "-p", "plan_plugins:Refusing", "--world", "2", *FOUR, fails=2).err
    assert "this executor wants several parts" in told


# -- several ranks that are not there ---------------------------------------------------------------------------------

SPLIT = ("--world", "8", "-p", "tp", "-s", "parallel.tp=2", "-s", "train.global_batch=16")


@pytest.mark.slow
def test_one_plan_after_another_leaves_no_process_group(forge: Forge) -> None:
    def again(*arguments: str) -> Any:
        return forge("plan", "tiny.toml", "--json", *arguments).json

    alone, split = again(), again(*SPLIT)
    assert not torch.distributed.is_initialized()
    assert again() == alone
    assert again(*SPLIT) == split


@pytest.mark.slow
def test_phases_meshes_and_grids(forge: Forge) -> None:
    plan = planned(forge, *SPLIT)
    assert [(entry["phase"], entry["plugin"]) for entry in plan["phases"]] == [("TENSOR", "tp"), ("SHARD", "fsdp2")]
    assert plan["meshes"] == {
        "dense": {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 2},
        "batch": {"pp": 1, "dp": 4, "cp": 1, "tp": 2},
    }
    assert plan["grids"]["dense"] == [[[[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]]]
    text = forge("plan", "tiny.toml", *SPLIT).out
    assert "tp 2        0 1 | 2 3 | 4 5 | 6 7" in text
    assert "dp_shard 4  0 2 4 6 | 1 3 5 7" in text
    assert "idle" not in text


def test_each_parameter_is_where_its_placement_says(forge: Forge) -> None:
    counts = planned(forge, *SPLIT)["parameters"]
    for group in counts["groups"]:
        ways = {
            "rows over dp_shard 4": 4,
            "rows over dp_shard 4 × tp 2": 8,
            "rows over dp_shard 4; columns over tp 2": 8,
            "rows over tp 2; columns over dp_shard 4": 8,  # 257 rows divide nowhere
        }
        assert group["held"] >= group["total"] / ways[group["placement"]]
    assert counts["held"] == sum(group["held"] for group in counts["groups"])
    assert counts["total"] == sum(counts["by_module"].values()) == planned(forge)["parameters"]["total"]


@pytest.mark.slow
def test_the_expected_bytes_beside_what_is_counted(forge: Forge) -> None:
    plan = planned(forge, *SPLIT)
    assert plan["expected_bytes"].keys() == {"tp", "dp_shard"}
    for axis, least in plan["expected_bytes"].items():
        sent = sum(one["bytes"] for one in plan["communication"] if one["axis"] == axis)
        assert 0.8 * least < sent <= 1.05 * least
    assert "× the expected" in forge("plan", "tiny.toml", *SPLIT).out


@pytest.mark.slow
def test_micro_batches_between_the_first_and_the_last_count_too(forge: Forge) -> None:
    def gathered(micro_batches: int) -> int:
        batch = ("-s", f"train.global_batch={2 * micro_batches}", "-s", "train.micro_batch=1")
        plan = planned(forge, "--world", "2", *batch)
        assert plan["accumulation"] == micro_batches
        return sum(one["count"] for one in plan["communication"] if one["kind"] == "all_gather")

    three, four, nine = gathered(3), gathered(4), gathered(9)
    assert four > three
    assert nine - four == 5 * (four - three)


@pytest.mark.slow
def test_recompute_keeps_less_and_computes_more(forge: Forge) -> None:
    layers = ("-s", "decoder.layers=4")
    kept, recomputed = planned(forge, *layers), planned(forge, *layers, "-p", "ac")
    assert recomputed["memory"]["activations"] < 0.7 * kept["memory"]["activations"]
    assert 1.2 * kept["kernel_flops"] < recomputed["kernel_flops"] < 4 / 3 * kept["kernel_flops"]
    assert recomputed["flops_per_token"] == kept["flops_per_token"]


def test_the_kernels_do_what_the_model_declares(forge: Forge) -> None:
    """But for attention's, which are counted whole where documents are apart, and computed once more backward."""
    plan = planned(forge, "-s", "text.isolate=false", "-s", "train.sequence=64", "-s", "decoder.dim=64")
    assert plan["kernel_flops"] == pytest.approx(plan["flops_per_token"] * 2 * 64, rel=0.1)


@pytest.mark.slow
def test_a_device(forge: Forge) -> None:
    roof = planned(forge, *SPLIT, "--device", "H100", "--nodes", "4")["roofline"]
    assert roof["bound"] in ("compute", "memory", "communication")
    assert roof["step"] == max(roof["compute"] + roof["memory"], roof["communication"])
    assert roof["tokens_per_second"] == pytest.approx(16 * 16 / roof["step"])
    assert roof["unfused_tokens_per_second"] <= roof["tokens_per_second"]
    assert roof["fits"] is True
    assert 0 < roof["mfu"] < 1
    text = forge("plan", "tiny.toml", *SPLIT, "--device", "h100").out
    assert "At most, on H100" in text
    assert "fits into" in text
    assert planned(forge, *SPLIT)["roofline"] is None


@pytest.mark.slow
def test_warnings(forge: Forge) -> None:
    assert planned(forge, *SPLIT)["warnings"] == []
    plan = planned(forge, *SPLIT, "--nodes", "8")
    assert plan["nodes"] == 8
    assert plan["crossing"] == ["dp_shard", "tp"]
    assert "tp crosses nodes" in plan["warnings"][0]
    large = (*FOUR, "-s", "decoder.vocabulary=1100000", "-s", "train.sequence=4", "--device", "a100")
    whole = planned(forge, "--world", "2", "-p", "ddp", *large)["warnings"]
    assert "Each of the 2 ranks holds the whole of embedding.weight (67.1 MiB), head.weight" in whole[0]
    assert planned(forge, "--world", "2", *large)["warnings"] == []
    batch = ("-s", "train.global_batch=4000", "-s", "train.micro_batch=4000", "-s", "decoder.hidden=1000000")
    (heavy,) = planned(forge, *batch, "--device", "a100")["warnings"]
    assert "A100 SXM 80 GB has 74.5 GiB" in heavy


def test_data_says_what_a_batch_looks_like(forge: Forge, plugins: None) -> None:
    def memory(data: str) -> Any:
        options = ("-p", f"plan_plugins:{data}", "--without", "text", "-s", "decoder.vocabulary=300")
        return planned(forge, *options)["memory"]

    silent, described = memory("Rows"), memory("Documents")
    (note,) = silent["notes"]
    assert "plugin 'rows' says nothing of them (example_batch)" in note
    assert described["notes"] == []
    mask = 4 * 2 * 16 * 16  # of floats, which attention keeps for a batch of two sequences of 16 tokens
    assert described["activations"] >= silent["activations"] + mask


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-p", "compile"), ("-s", "train.precision=fp16"), ("-s", "decoder.tied=true")])
def test_plans_what_trains(forge: Forge, options: tuple[str, ...]) -> None:
    for world in ("1", "2"):
        memory = planned(forge, *FOUR, *options, "--world", world)["memory"]
        assert memory["notes"] == []
        assert memory["peak"] > memory["activations"] > 0


def test_shows_the_groups_of_parameters_that_patterns_make(forge: Forge) -> None:
    groups = 'adamw.groups=[{match="layers.*.attention.*", lr=0.5}, {match="embedding.weight", weight_decay=0.3}]'
    made = forge("plan", "-s", groups, "-s", "decoder.layers=2", "-s", "adamw.lr=0.002", "--json").json
    by_match = {(one["match"], one["weight_decay"]): one for one in made["optimizer"]}
    attention = by_match["layers.*.attention.*", 0.1]
    assert (attention["parameters"], attention["lr"], attention["lr_factor"]) == (8, 0.001, 0.5)
    assert by_match["embedding.weight", 0.3]["lr"] == 0.002
    assert sum(one["elements"] for one in made["optimizer"]) == made["parameters"]["total"]
    assert "layers.*.attention.*           8" in forge("plan", "-s", groups, "-s", "decoder.layers=2").out


@pytest.mark.slow
def test_a_pattern_for_one_of_many_layers_is_planned_and_one_for_none_is_refused(forge: Forge) -> None:
    made = forge("plan", "--json", "-s", "decoder.layers=16", "-s", 'adamw.groups=[{match="layers.7.*", lr=0.5}]').json
    assert sum(one["parameters"] for one in made["optimizer"] if one["match"] == "layers.7.*") > 0
    refused = forge("plan", "-s", 'adamw.groups=[{match="layer.*"}]', fails=2)
    assert "adamw.groups: 'layer.*' matches no trainable parameter." in refused.err

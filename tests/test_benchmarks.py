"""What the benchmarks measure still runs: each piece once, at a size that takes a moment. What they find is no test."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_cli import forge
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(file.stem for file in FOLDER.glob("*.py"))
Script = Callable[..., Any]

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Imports a script and sets its sizes; the scripts' names are free again afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    held = {name: sys.modules.pop(name) for name in SCRIPTS if name in sys.modules}

    def load(name: str, **sizes: Any) -> Any:
        module = importlib.import_module(name)
        for size, value in sizes.items():
            monkeypatch.setattr(module, size, value)
        return module

    yield load
    for name in SCRIPTS:
        sys.modules.pop(name, None)
    sys.modules.update(held)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_can_be_imported(name: str, script: Script) -> None:
    assert script(name).__doc__


def test_the_loader_of_text(script: Script, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A line of some words.\n" * 5000)
    assert script("run").text(f"text.path={tmp_path / 'text.txt'}", f"text.cache={tmp_path}")[0].what


@pytest.mark.slow
def test_attention_over_packed_documents(script: Script, tmp_path: Path) -> None:
    attention = script("attention", TOKENS=256, STEP=64)
    work = {name: attention.attention(name) for name in attention.KERNELS}
    assert min(attention.seconds(work, 1).values()) > 0
    assert all(attention.peak(one) > 0 for one in work.values())
    assert attention.steps(tmp_path, 32).keys() == {"joined", "apart", "dense"}


@pytest.mark.extended  # CI runs what they measure
@pytest.mark.slow
def test_captured_activations(script: Script, tmp_path: Path) -> None:
    captured = script("captured")
    captured.LAYOUTS = {"pp2": captured.LAYOUTS["pp2"], "ep2": captured.LAYOUTS["ep2"]}
    pipeline, experts = captured.cells(["decoder"], tmp_path)
    assert pipeline == ("decoder", "pp2", 34, 0.0, "")
    assert experts[4].startswith("refused: parallel.ep = 2: the model has no experts to spread")


@pytest.mark.slow
def test_decoding_clips(script: Script) -> None:
    clips = script("clips", BATCH=2)
    memory, seconds = clips.decoded(20)
    assert len(memory) == 10
    assert min(*memory, seconds) > 0
    memory = clips.trained(20)
    assert len(memory) == 10
    assert clips.grown(memory, 20) == (memory[-1] - memory[0]) * 2**20 / 18


@pytest.mark.extended  # CI runs what they measure
@pytest.mark.slow
def test_frozen_encoders(script: Script) -> None:
    found = script("frozen_encoders", IMAGES=2, SEQUENCE=64).measured(1)
    assert all(0 < vision < step for vision, step in found.values())


def test_linear_attention(script: Script) -> None:
    linear = script("linear_attention", DIM=64, HEADS=2, KV_HEADS=1, HEAD_DIM=32)
    for layer in linear.layers(64).values():
        linear.training(layer, 64)()
        assert linear.kept(layer, 64) > 0
        assert min(linear.generation(layer, 64)) > 0


def test_generation(script: Script, tmp_path: Path) -> None:
    generation = script("generation", LONGEST=20, TOKENS=8, MANY=9, TURNS=1)
    generation.write_model(tmp_path, **generation.TINY)
    same, *rows = generation.measured("tiny", tmp_path)
    assert same.ok
    assert len(rows) == 8
    rows = list(generation.on_code(tmp_path))
    assert all(row.ok for row in rows), rows
    assert len(rows) == 4


def test_experts(script: Script) -> None:
    experts = script("experts", TOKENS=64, DIM=32)
    assert min(experts.product()) > 0
    assert min(experts.memory()) > 0
    x = experts.torch.randn(1, 64, 32, requires_grad=True)
    experts.trained(experts.dense(), x)()


def test_the_cost_of_a_trace(script: Script, tmp_path: Path) -> None:
    cost = script("trace_cost", WARM_UP=0, TURNS=1)
    small = ("decoder.dim=16", "decoder.layers=1", "train.global_batch=2", "train.sequence=32")
    traced, plain = (cost.steps(str(tmp_path), (), small, traced) for traced in (True, False))
    assert (len(traced["spent"]["traced"]), len(plain["spent"]["plain"])) == (1, 2)
    assert (traced["losses"], traced["weights"]) == (plain["losses"], plain["weights"])


def test_optimizers(script: Script) -> None:
    optimizers = script("optimizers", COUNT=4, ROWS=32, COLUMNS=64)
    assert min(optimizers.one_process().values()) > 0
    assert optimizers.state_in_bits().keys() == {"fp32", "bf16", "8bit", "4bit"}


def test_low_precision(script: Script) -> None:
    low = script("low_precision", TOKENS=64, INPUTS=64, OUTPUTS=32, SEEDS=1)
    assert len(low.signal_table()) == 3 + len(low.RECIPES)


@pytest.mark.slow
def test_lora(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("peft", "transformers"):
        pytest.importorskip(package)
    lora = script("lora", DIM=32, LAYERS=2, HEADS=2, HIDDEN=48, WORDS=320, SEQUENCE=32, RANK=2, STEPS=3, WARM_UP=1)
    lora.forge()
    lora.forge(**{"lora.base": "nf4", "lora.base_block": 16})
    lora.peft()
    ours, coded, theirs = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert ours.pop("coded") == 0
    assert min(ours.values()) > 0
    assert theirs["seconds"] > 0
    assert ours["held"] + ours["most"] < 1.1 * (ours["base"] + 16 * ours["trained"] + ours["activations"])
    assert coded["coded"] == 0.5 + 4 / 16
    assert coded["held"] < ours["held"]


@pytest.mark.slow
def test_answers(script: Script, tmp_path: Path) -> None:
    """A model of two steps, so small that it knows nothing, is trained, tuned, exported and asked."""
    pytest.importorskip("transformers")
    small = {"MODULES": ("bisect", "fnmatch"), "SOURCES": "b*.py", "DIM": 32, "LAYERS": 1, "STEPS": 2, "TOKENS": 128}
    asked = script("answers", **small).measure(tmp_path)
    assert len(asked.base) == len(asked.tuned) == len(asked.theirs) == len(asked.tested) == 3
    assert asked.share([line for _, line in asked.tested]) == 1.0
    assert asked.share(asked.base) == 0.0


@pytest.mark.extended  # CI runs what they measure
@pytest.mark.slow
def test_records(script: Script, tmp_path: Path) -> None:
    records = script("records", COUNT=24, FEW=16, SHARED=8)
    records.desk(tmp_path)
    records.train(tmp_path, "large", (16, 1))
    found = records.shares(tmp_path, "out.parquet", "log_likelihood")
    assert found.records == 8
    assert 0 < found.outside < 1


def test_metrics_and_trackers(script: Script) -> None:
    observing = script("observing", WARM_UP=2, STEPS=3)
    assert observing.run(observing.Observes, "csv", "tensorboard") is not None


def test_loaders_of_token_shards(script: Script, tmp_path: Path) -> None:
    loaders = script("loaders", SEQUENCE=64, MICRO_BATCH=2)
    loaders.sparse(tmp_path, 20_000, 40, 2)
    assert next(loaders.loader(tmp_path, held_out=0.0)).inputs.shape == (2, 64)


@pytest.mark.parametrize("how", ["copy", "at_once", "behind"])
def test_checkpoints(script: Script, tmp_path: Path, how: str) -> None:
    checkpoints = script("checkpoints", PIECE=4096, PIECES=4)
    assert checkpoints.save(tmp_path, how)["whole"] > 0


def test_a_disk(script: Script, tmp_path: Path) -> None:
    assert min(script("checkpoints", PIECE=8 << 20, PIECES=1).disk(tmp_path, "").values()) > 0


def test_a_run_with_checkpoints(script: Script, tmp_path: Path) -> None:
    small = {"decoder.dim": 32, "decoder.layers": 1, "decoder.hidden": 64, "checkpoint.every": 4}
    checkpoints = script("checkpoints", STEPS=13, EVERY=4)
    checkpoints.MODEL.update(small)
    assert checkpoints.train(tmp_path, "behind")["bytes"] > 0


@pytest.mark.slow
def test_probes(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    probes = script("probes", BATCH=1, SEQUENCE=16)
    for transformers in (False, True):
        probes.plain(5, transformers=transformers)
    probes.loss(64)
    assert capsys.readouterr().out.count("peak") == 3
    values = ", ".join(f"{key} = {one}" for key, one in probes.TRANSFORMERS.items() if one is not None)
    resolve(Request("quickstart", set=probes.SHAPE))
    others = (one for one in probes.SHAPE if not one.startswith("decoder."))
    resolve(Request("quickstart", ("hf",), set=(*others, "hf.type=stablelm", f"hf.set={{ {values} }}")))


def test_exchange_with_hugging_face(script: Script, tmp_path: Path) -> None:
    exchange = script("huggingface", TOKENS=6)
    exchange.write_model(tmp_path / "tiny", **exchange.TINY)
    for way in ("plain", "flushed", "convert", "bring_in"):
        exchange.WAYS[way](tmp_path / "tiny", tmp_path / way)
    exchange.take_out(tmp_path / "bring_in", tmp_path / "out")
    exchange.hashed(tmp_path / "out", tmp_path)
    assert exchange.speak(tmp_path / "tiny").keys() == {"forge", "transformers"}


@pytest.mark.slow
def test_evaluating(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"RECORDS": 4, "TOKENS": 2, "BATCHES": (1, 3), "MODELS": {"experts": ("one process",)}}
    evaluating = script("evaluating", **sizes)
    table = evaluating.measured()
    assert [*table] == ["experts, one process", "experts, lm-eval's own model on the export"]
    assert all(row.worst <= evaluating.BOUND and not sum(row.changed.values()) for row in table.values())
    assert "| experts, one process |" in evaluating.page(table)


def test_evaluating_while_training(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = {"decoder.dim": 16, "decoder.layers": 1, "decoder.heads": 2, "train.sequence": 64}
    training = script("evaluating_training", ROUNDS=1, TOKENS=2, MODEL=model)
    monkeypatch.setattr(script("evaluating"), "RECORDS", 4)
    training.write_all()
    found = {task: training.measured(task, str(tmp_path)) for task in ("scored.toml", "written.toml")}
    assert all(0 < min(clock.passes) < min(clock.whole) for clock in found.values())
    assert "| written.toml |" in training.page(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "video"])
def test_seeing(script: Script, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drawings, the questions and the page; a model of two steps tells nothing."""
    pytest.importorskip("av")
    seeing, folder = script("seeing", STEPS={"image": 2, "video": 2}, ASKED=2), tmp_path / kind

    def here(folder: Path, *words: str) -> tuple[Any, float]:
        monkeypatch.chdir(folder)
        return forge(*words, "--json").json, 1.0

    monkeypatch.setattr(seeing, "forge", here)
    seeing.Desk(folder, kind).fill(150, 2)
    made, kept = script("drawings").every(kind)
    assert not {caption for caption, _ in made} & {caption for caption, _ in kept}
    seen = seeing.measured(folder, kind, "prefix")
    names = {"new", "unseen", "other", *(("still", "reversed") if kind == "video" else ())}
    assert seen.right == dict.fromkeys(names, 0.0)
    assert not all(met for *_, met in seeing.bars(kind, "prefix", seen, seeing.chance(folder)))


def test_one_frame_of_a_clip_tells_one_direction_in_three(script: Script) -> None:
    """Each direction starts in 12 of the 16 cells, as often in each, and ends in the next one."""
    drawings, draw = script("drawings"), random.Random(0)
    starts = {}
    for move, step in drawings.MOVES.items():
        clips = [drawings.moving(draw, "black", "square", move) for _ in range(240)]
        ways = [[_cell(frame) for frame in (clip[0], clip[-1])] for clip in clips]
        assert {(two[0] - one[0], two[1] - one[1]) for one, two in ways} == {step}
        starts[move] = Counter(one for one, _ in ways)
    assert all(len(cells) == 12 and min(cells.values()) >= 8 for cells in starts.values())
    assert len(set().union(*starts.values())) / 48 == drawings.STILL


def _cell(frame: Any) -> tuple[int, int]:
    left, top, right, bottom = frame.convert("L").point(lambda grey: 255 * (grey < 128)).getbbox()
    return (left + right) // 16, (top + bottom) // 16


def test_a_report_of_many_long_runs(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the drawing, which needs a browser."""
    viewer = script("viewer", RUNS=6, STEPS=2500)
    monkeypatch.setattr(viewer.shutil, "which", lambda name: None)
    found = viewer.measured(tmp_path)
    assert found["missing"] == 0
    assert found["frame"] < viewer.SMALLEST
    assert "| spikes that are missing, of 30 | 0 | 0 |" in viewer.report(found)


@pytest.mark.extended  # CI runs what they measure
@pytest.mark.slow
def test_the_search(script: Script, tmp_path: Path) -> None:
    found = script("search", WORLD=2, RESULTS=tmp_path / "search.md")
    small = ("decoder.layers=1", "train.sequence=16", "train.global_batch=4", "train.precision=bf16")
    found.LARGE = Request(config="quickstart", without=("compile", "ac", "tp", "cp", "pp", "ep"), set=small)
    rows = found.scale()
    assert [row.ok for row in rows] == [False, True, True]
    found.RESULTS.write_text(found.record(rows))
    found.LARGE = found.SMALL = Request(config="other", set=small)
    errors = [found.Row("other, 2 ranks", "3.0%", "≤ 5 %", ok=True)]
    for _ in range(2):
        found.RESULTS.write_text(found.record(errors))
    assert found.RESULTS.read_text().count("other, 2 ranks") == 1
    assert "quickstart, 2 ranks: peak memory" in found.RESULTS.read_text()

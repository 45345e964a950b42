"""What commands print: counts as counts, named axes with round ticks, tables without long padding."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from crossed import crossed
from forge_command import Forge, typed
from forge_train.mesh.layout import Layout
from forge_train_cli.curves import Curve, drawing
from forge_train_cli.screen import WIDEST
from forge_train_kit.data.prepare.progress import Report
from forge_train_kit.data.prepare.tasks import Preparation
from forge_train_kit.data.stages import passes
from forge_train_kit.format import format_number, format_phase
from forge_train_tools.launching.changes import changed_layout

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2556.0, "2556"),
        (123456.0, "123456"),
        (2.0, "2"),
        (0.0, "0"),
        (2556.25, "2556.2"),
        (0.5, "0.5"),
        (1e20, "1.00e+20"),
    ],
)
def test_a_count_is_a_count(value: float, text: str) -> None:
    assert format_number(value) == text


def ticks(drawn: str) -> list[str]:
    return re.findall(r'<text x="58" [^>]*>([^<]*)</text>', drawn)


def test_a_logarithmic_axis_has_powers_of_ten() -> None:
    curve = Curve(0, "a", [(step, 10.0 ** (4 - step)) for step in range(8)])
    assert ticks(drawing("Loss", [curve], logarithmic=True)) == [
        "0.001", "0.01", "0.1", "1", "10", "100", "1000", "10000"
    ]  # fmt: skip
    near = ticks(drawing("Loss", [Curve(0, "a", [(1, 2.5), (2, 9.0)])], logarithmic=True))
    assert near == ["5"]
    assert len(ticks(drawing("Loss", [Curve(0, "a", [(1, 2.51), (2, 2.6)])], logarithmic=True))) >= 3
    wide = Curve(0, "a", [(1, 1e-20), (2, 1e20)])
    assert 4 <= len(ticks(drawing("Loss", [wide], logarithmic=True))) <= 9


def test_axes_have_names() -> None:
    drawn = drawing("Loss & more", [Curve(0, "a", [(1, 2.0), (2, 1.0)])])
    assert re.findall(r'class="axis"[^>]*>([^<]*)<', drawn) == ["step", "Loss &amp; more"]


def test_a_long_value_does_not_widen_a_table(forge: Forge) -> None:
    long = "a " * 150
    lines = forge("config", "show", "tiny.toml", "-p", "sample", "-s", f"sample.prompt={long}").out.splitlines()
    (own,) = [line for line in lines if line.startswith("sample.prompt ")]
    assert long.strip() in own
    assert max(len(line) for line in lines if line is not own) < 3 * WIDEST


@pytest.mark.slow
@pytest.mark.parametrize(("command", "columns"), crossed(["presets", "plugins list", "config show"], [40, 60, 80, 200]))
def test_lists_fit_the_terminal(command: str, columns: int) -> None:
    lines = typed(*command.split(), columns=columns)
    assert len(lines) > 20
    assert max(map(len, lines)) <= columns
    squeezed = [line for line in lines if len(line.split()) == 1 and len(line.strip()) == 1]
    assert len(squeezed) <= len(lines) / 4


def test_the_rate_of_packed_files_is_that_of_their_text(forge: Forge, folder: Path) -> None:
    records = "".join(json.dumps({"text": f"the same words {n % 3} " * 40}) + "\n" for n in range(400))
    with gzip.open(folder / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(records)
    shown = forge("data", "prepare", "a.jsonl.gz", "--out", "out", "--workers", "1").out
    assert re.search(r"bytes a token, 257 token ids · ", shown), shown
    report = Report()
    report.begin([], [])
    report._all = 10
    report.at(5)
    report.end({}, 1000)
    assert (report.read, report.text) == (5, 500)


def test_a_small_part_of_an_epoch_is_not_0() -> None:
    assert passes(374_151, 48) == "374,151 sequences an epoch, 0.0001 epochs in this run"
    assert passes(100, 150) == "100 sequences an epoch, 1.50 epochs in this run"


def test_a_field_by_source(forge: Forge, folder: Path) -> None:
    (folder / "a.jsonl").write_text(json.dumps({"text": "first"}) + "\n", encoding="utf-8")
    (folder / "code.jsonl").write_text(json.dumps({"content": "other one"}) + "\n", encoding="utf-8")
    sources = ["data", "prepare", "a.jsonl", "code.jsonl", "--workers", "1", "--held-out", "0"]
    assert "code.jsonl" in forge(*sources, "--out", "out", fails=2).err
    forge(*sources, "--out", "two", "--field", "code*=content")
    manifest = json.loads((folder / "two" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["settings"]["fields"] == [["code*", "content"]]
    assert "no file of records is 'cod.jsonl'" in forge(*sources, "--out", "x", "--field", "cod.jsonl=a", fails=2).err
    assert Preparation((), Path()).public() == {"held_out": 0.01, "train_tokenizer": 0, "field": "text", "maps": []}


def test_a_changed_layout_is_told(forge: Forge, folder: Path) -> None:
    forge("train", "tiny.toml", "--name", "a", "-s", "train.steps=1", "-s", "train.evaluate_every=0")
    (checkpoint,) = (folder / "runs" / "a" / "checkpoints").glob("step-*")
    saved = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["config"]
    assert not changed_layout(checkpoint, saved, Layout())
    assert changed_layout(checkpoint, saved, Layout(dp_shard=2)) == "dp_shard 1 then, 2 now"
    assert changed_layout(checkpoint, saved, Layout(tp=2, pp=3)) == "pp 1 then, 3 now, tp 1 then, 2 now"
    events = folder / "runs" / "a" / "events.jsonl"  # as if two processes had trained it
    events.write_text(events.read_text(encoding="utf-8").replace('"world": 1', '"world": 2'), encoding="utf-8")
    assert (
        "The layout changed: dp_shard 2 then, 1 now" in forge("train", "--resume", "runs/a", "-s", "train.steps=2").err
    )


def test_a_tokenizer_is_described_in_words(forge: Forge) -> None:
    shown = forge("data", "show", "tiny.toml").out
    assert "no token before a document, token 256 after it" in shown


def test_bf16_is_no_float8(forge: Forge) -> None:
    said = forge("train", "tiny.toml", "-s", "train.precision=bf16", "-s", "train.steps=1").out
    assert "float8" not in said
    assert re.search(r"· precision \(\d+\)", said)


@pytest.mark.slow
def test_the_plan_of_bf16_has_no_float8_and_no_idle_precision(forge: Forge) -> None:
    shown = forge("plan", "tiny.toml", "-s", "train.precision=bf16").out
    assert re.search(r"^  PRECISION +precision", shown, re.MULTILINE)
    sharded = ("-p", "fsdp2", "--world", "2", "-s", "train.micro_batch=1")
    shown = forge("plan", "tiny.toml", "-s", "train.precision=bf16", *sharded).out
    assert "SHARD" in shown
    assert "FLOAT8" not in shown
    assert "Idle at this size" not in shown
    assert format_phase("FLOAT8", "fp8") == "FLOAT8"

"""The pages for users of other trainers: every option and command of ours in them exists, and translations resolve."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from forge_train.registry.discovery import discover
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from pages import parse

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to" / "coming-from.md").read_text(encoding="utf-8")
OTHERS = {page.stem: page.read_text(encoding="utf-8") for page in sorted((DOCS / "coming-from").glob("*.md"))}
ROWS = [line.split("|") for text in OTHERS.values() for line in text.splitlines() if re.match(r"\| [`a-z]", line)]
OURS = [line.split("|")[1].strip() for line in PAGE.splitlines() if re.match(r"\| [`a-z]", line)]
OURS += [row[2].strip() for row in ROWS]
CALLS = {"job.control.stop", "step.add", "evaluation.add"}
KEYS = sorted({key for cell in OURS for key in re.findall(r"`([a-z0-9_]+\.[a-z_.]+)", cell)} - CALLS)
TITLED = re.compile(r'^```toml title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
PLUGINS = sorted({name for cell in OURS for name in re.findall(r"-p ([a-z0-9_]+)", cell)})


def test_the_pages_have_rows() -> None:
    assert len(OURS) > 200
    assert len(KEYS) > 100
    assert all(line.count("|") == 7 for line in PAGE.splitlines() if line.startswith("|"))
    assert {len(row) for row in ROWS} == {4}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_exists(key: str) -> None:
    """In the tables of options, which are written from the code."""
    section, _, name = key.partition(".")
    page = DOCS / "plugins" / f"{section}.md"
    core = (
        (DOCS / "configuration.md").read_text(encoding="utf-8").partition(f"### `[{section}]`")[2].partition("### ")[0]
    )
    options = page.read_text(encoding="utf-8") if page.is_file() else core
    assert f"| `{name}` |" in options


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_exists(plugin: str) -> None:
    assert plugin in {one.name for one in discover()}


@pytest.mark.parametrize("line", sorted({one for cell in OURS for one in re.findall(r"`(forge [^`…]+)`", cell)}))
def test_a_command_exists(line: str) -> None:
    parse(line)


def test_translations_say_the_same(tmp_path: Path) -> None:
    """Numbers that stand in both, and those that had to be computed."""
    made = {}
    for name, text in OTHERS.items():
        ((title, written),) = TITLED.findall(text)
        (tmp_path / title).write_text(written, encoding="utf-8")
        made[name] = resolve(Request(config=str(tmp_path / title)), training=False).config
    batches = {name: (one.train.global_batch, one.train.micro_batch, one.train.sequence) for name, one in made.items()}
    assert batches == {
        "hugging-face-trainer": (4 * 8, 4, 1024),
        "lightning": (8 * 4 * 2, 8, 512),
        "litgpt": (512, 4, 2048),
        "megatron-lm": (128, 1, 8192),
        "torchtitan": (8, 1, 8192),
    }
    assert made["megatron-lm"].train.steps == 1_953_125_000 // 128
    assert made["megatron-lm"].sections["cosine"].warmup == round(3_906_252 / 128)
    assert made["megatron-lm"].sections["cosine"].floor == pytest.approx(1e-5 / 1.5e-4, rel=1e-3)
    assert made["litgpt"].sections["cosine"].floor == pytest.approx(4e-5 / 4e-4)
    assert made["lightning"].train.evaluate_every == 2000 / 4
    assert made["lightning"].train.evaluate_batches * 64 == 20 * 8 * 2


def test_names_of_the_hugging_face_trainer_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    rows = [line for line in OTHERS["hugging-face-trainer"].splitlines() if re.match(r"\| `[a-z_0-9]+`", line)]
    theirs = {name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row.split("|")[1])}
    assert len(theirs) > 30
    assert theirs - known - {"compute_loss", "train_dataset", "torchrun"} == set()


def test_the_defaults_are_as_told() -> None:
    config = resolve(Request(plugins=("lora",)), training=False).config.sections["lora"]
    assert (config.rank, config.alpha) == (16, 32.0)

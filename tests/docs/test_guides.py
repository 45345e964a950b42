"""Guides of docs/learn: pages, notebooks and pictures are those of their sources, and a run prints what they show."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))
drawings, guides = (importlib.import_module(name) for name in ("drawings", "guides"))


@pytest.mark.parametrize("name", guides.GUIDES)
def test_a_notebook_has_the_cells_of_its_source(name: str) -> None:
    source, recorded = guides.source(name), guides.recorded(name)
    assert [(one.cell_type, one.source) for one in recorded.cells] == [
        (one.cell_type, one.source) for one in source.cells
    ]
    assert any("Break it" in one.source for one in source.cells)
    assert sum(bool(text) for text in guides.outputs(recorded)) >= 3


@pytest.mark.parametrize("name", guides.GUIDES)
def test_a_page_is_that_of_its_notebook(name: str) -> None:
    page = (guides.LEARN / f"{name}.md").read_text(encoding="utf-8")
    assert page == guides.page(name, guides.recorded(name))
    assert f"({name}.svg)" in page
    assert "\nThey agree." not in page, "what is broken has no effect"


@pytest.mark.parametrize("name", sorted(drawings.PICTURES))
def test_a_picture_is_what_the_script_draws(name: str) -> None:
    assert (guides.LEARN / f"{name}.svg").read_text(encoding="utf-8") == drawings.PICTURES[name]()


def test_every_source_is_a_guide_in_the_order_of_the_index() -> None:
    sources = {path.stem for path in guides.LEARN.glob("*.py")} - {guides.SETUP}
    assert sources == set(guides.GUIDES) == set(drawings.PICTURES)
    index = (guides.LEARN / "index.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"\]\((\w+)\.md\)", index)) == guides.GUIDES


TRIED = re.compile(r"`forge (?:trace|verify|plan) learn\.toml ([^`…]+)`")


def _tried(name: str) -> list[str]:
    """Options of the commands that a guide has its reader try."""
    text = guides.recorded(name).cells[-1].source
    assert "## Try" in text
    return TRIED.findall(text)


@pytest.mark.parametrize("name", guides.GUIDES)
def test_what_a_reader_tries_can_be_composed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    helpers = (guides.LEARN / f"{guides.SETUP}.py").read_text(encoding="utf-8")
    exec(helpers, {})  # writes learn.toml
    parser = argparse.ArgumentParser()
    for options in (("--nproc", "--world"), ("--out",), ("--against",)):
        parser.add_argument(*options, default="1")
    for letter in ("-p", "-s"):
        parser.add_argument(letter, action="append", default=[])
    parser.add_argument("--json", action="store_true")
    for command in _tried(name):
        asked = parser.parse_args(shlex.split(command))
        resolve(Request("learn.toml", tuple(asked.p), set=tuple(asked.s)), world=int(asked.nproc))


def test_the_guides_that_are_read_first_say_the_whole_command() -> None:
    assert all(_tried(name) for name in ("ddp", "fsdp2", "tp", "together"))


@pytest.mark.skipif(not warm.FORKS, reason="only Linux can")
@pytest.mark.slow
def test_one_process_forks_all_commands_of_a_program(tmp_path: Path) -> None:
    with warm.program(tmp_path) as programs:
        subprocess.run([programs / "forge", "--version"], check=True, capture_output=True)
        forking = warm.started()
        subprocess.run([programs / "forge", "--version"], check=True, capture_output=True)
        assert warm.started() is forking


@pytest.mark.slow
@pytest.mark.parametrize("name", guides.GUIDES)
def test_a_run_prints_what_the_guide_shows(tmp_path: Path, name: str) -> None:
    with warm.program(tmp_path) as programs:
        assert guides.outputs(guides.run(name, programs)) == guides.outputs(guides.recorded(name))

"""Guides of docs/learn: pages, notebooks and pictures are those of their sources, and a run prints what they show."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

import warm
from crossed import marked

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))
drawings, guides = (importlib.import_module(name) for name in ("drawings", "guides"))

OFTEN = ("fsdp2",)
"""Guides that CI runs on each change."""


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


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(guides.GUIDES, set(guides.GUIDES) - {*OFTEN}))
def test_a_run_prints_what_the_guide_shows(tmp_path: Path, name: str) -> None:
    with warm.program(tmp_path) as programs:
        assert guides.outputs(guides.run(name, programs)) == guides.outputs(guides.recorded(name))

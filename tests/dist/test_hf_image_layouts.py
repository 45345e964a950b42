"""Classes of transformers that read images, on two ranks, of which some have no image: equal to one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hf_images
from crossed import few, marked
from forge_train import ConfigError
from forge_train_tools.configuration.request import Request
from forge_train_tools.testing import Verifier

pytest.importorskip("transformers")
pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.dist]

PLUGINS = ("hf", "hf_images", "multimodal")
LAYOUTS: dict[str, tuple[str, ...]] = {"fsdp2, ac": ("fsdp2", "ac"), "ddp": ("ddp",), "zero1": ("zero1",)}
CASES = [(kind, layout) for kind in hf_images.KINDS for layout in LAYOUTS]


def written(tmp_path: Path, kind: str) -> dict[str, Any]:
    """A folder, and settings that train on its pictures; rows of text alone come between them."""
    folder = hf_images.saved(tmp_path / "folder", kind)
    one, two = hf_images.prompts(kind)
    given = [{"text": "a b c d e f"}, {"text": one, "images": ["a.png"]}, {"text": two, "images": ["c.png", "b.png"]}]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(given[at % 3])}\n" for at in (0, 1, 0, 2, 0, 0, 1, 2)))
    path, cache = str(folder / "rows.jsonl"), str(tmp_path / "cache")
    return {
        "run": {"device": "cpu", "seed": 3},
        "train": {"steps": 2, "global_batch": 4, "micro_batch": 1, "sequence": 80, "evaluate_every": 0},
        "adamw": {"lr": 1e-3},
        "hf": {"weights": str(folder)},
        "multimodal": {"path": path, "cache": cache, "packing": "pad", "held_out": 0.0, "shuffle": False},
    }


def request(sections: dict[str, Any], *plugins: str, **parallel: int) -> Request:
    given = sections | ({"parallel": parallel} if parallel else {})
    return Request(plugins=(*PLUGINS, *plugins), without=("console", "tensorboard"), sections=given)


@pytest.mark.parametrize(("kind", "layout"), few(CASES, [("idefics3", "ddp"), ("qwen2_5_vl", "fsdp2, ac")]))
def test_agrees_with_one_process(kind: str, layout: str, verify: Verifier, tmp_path: Path) -> None:
    sections = written(tmp_path, kind)
    verdict = verify(request(sections, *LAYOUTS[layout]), 2, steps=2, reference=request(sections))
    assert verdict.agree, "\n".join(map(str, (*verdict.checks, *verdict.advice)))


@pytest.mark.parametrize("axis", marked(["tp", "cp", "pp"], ["cp", "pp"]))
def test_ranks_that_share_a_sequence_are_refused(axis: str, verify: Verifier, tmp_path: Path) -> None:
    asked = request(written(tmp_path, "llava"), axis, **{axis: 2})
    with pytest.raises(ConfigError, match=rf"parallel\.{axis}: LlavaForConditionalGeneration .* among whole sequences"):
        verify(asked, 2, steps=1)

"""Configurations of runs with items, before a model is built."""

from __future__ import annotations

from pathlib import Path

import pytest

import items_data
from forge_train import ConfigError
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve

pytestmark = pytest.mark.unit


def workers(plugin: str, *plugins: str, values: tuple[str, ...]) -> int:
    """Workers that read ahead, and without a mistake."""
    setup = resolve(Request(plugins=(plugin, *plugins), without=("text",), set=("train.steps=1", *values)))
    found: int = setup.config.sections[plugin].prefetch.workers
    return found


@pytest.mark.parametrize("modality", ["image", "video", "image_tiles"])
@pytest.mark.parametrize("plugin", ["multimodal", "sft"])
def test_items_are_decoded_ahead_of_a_step(tmp_path: Path, plugin: str, modality: str) -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("av") if modality == "video" else None
    path = f"{plugin}.path={items_data.write_records(tmp_path / 'a.jsonl', [{'text': 'a'}])}"
    assert workers(plugin, modality, values=(path,)) == 1
    assert workers(plugin, modality, values=(path, f"{plugin}.prefetch.workers=0")) == 0
    assert workers(plugin, modality, values=(path, f"{plugin}.prefetch.workers=3")) == 3


def test_texts_are_read_when_a_step_needs_them(tmp_path: Path) -> None:
    path = items_data.write_records(tmp_path / "a.jsonl", [{"text": "a"}])
    assert workers("sft", values=(f"sft.path={path}",)) == 0
    for items, expected in (("true", 1), ("false", 0)):
        sources = f"mixture.sources=[{{path='{path}', weight=1.0, items={items}}}]"
        assert workers("mixture", values=(sources, "mixture.packing=best_fit")) == expected


@pytest.mark.parametrize("plugin", ["multimodal", "sft"])
@pytest.mark.parametrize(
    ("path", "message"),
    [("gone.jsonl", r"'gone\.jsonl': no such file or folder"), ("*.parquet", "the pattern matches no file")],
)
def test_missing_data_is_told_before_a_model_is_built(plugin: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"{plugin}\.path: .*{message}"):
        workers(plugin, values=(f"{plugin}.path={path}",))

"""A language model inside another model in Hugging Face layout, without any plugin that knows both."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_train import Plugin, hookimpl
from forge_train_kit.hf import HFAround, HFModel
from forge_train_kit.state_map import Rename, StateMap
from forge_train_tools.offline.imported import _makers

pytestmark = pytest.mark.unit
INNER = HFModel(
    Rename({"model.embed.weight": "embedding.weight"}),
    sections={"decoder": {"dim": 4}},
    leftovers=(r"lm_head\.weight",),
    others=(Rename({"model.embed.packed": "embedding.weight"}),),
    exact=(r"model\..*",),
)
AROUND = HFAround(
    config={"model_type": "inner"},
    names=Rename({"text.model.{x*}": "model.{x*}", "text.lm_head.{x}": "lm_head.{x}"}),
    model=HFModel(
        Rename({"eye.weight": "fusion.eye.weight"}),
        sections={"eye": {"size": 2}},
        leftovers=(r"eye\.ids",),
        others=(Rename({"old.{x*}": "eye.{x*}"}),),
    ),
)


def given(map_: StateMap, *names: str) -> dict[str, Any]:
    step = map_.trace(dict.fromkeys(names, ((2,), torch.float32)))
    return {} if step.wrong or step.left else {name: view.name for name, view in step.given.items()}  # type: ignore[attr-defined]


def test_parts_are_put_together() -> None:
    whole = AROUND.whole(INNER)
    assert whole.sections == {"decoder": {"dim": 4}, "eye": {"size": 2}}
    assert whole.config == {"model_type": "inner"}
    assert whole.exact == INNER.exact
    assert given(whole.map, "text.model.embed.weight", "eye.weight") == {
        "embedding.weight": "text.model.embed.weight",
        "fusion.eye.weight": "eye.weight",
    }
    back = given(whole.map.inverse(), "embedding.weight", "fusion.eye.weight")
    assert back == {"text.model.embed.weight": "embedding.weight", "eye.weight": "fusion.eye.weight"}


@pytest.mark.parametrize("eye", ["eye", "old"])
@pytest.mark.parametrize("text", ["weight", "packed"])
def test_every_layout_of_one_goes_with_every_layout_of_the_other(eye: str, text: str) -> None:
    whole = AROUND.whole(INNER)
    names = f"text.model.embed.{text}", f"{eye}.weight"
    found = [given(one, *names) for one in (whole.map, *whole.others)]
    assert {"embedding.weight": names[0], "fusion.eye.weight": names[1]} in found


def test_leftovers_of_the_language_model_have_its_names_in_the_whole() -> None:
    whole = AROUND.whole(INNER)
    left = {"text.lm_head.weight": True, "lm_head.weight": True, "eye.ids": True, "eye.weight": False, "head": False}
    assert {name: whole.is_leftover(name) for name in left} == left


class Around(Plugin):
    """Knows a folder, and no module."""

    api = (1, 0)

    @hookimpl
    def import_hf_around(self, config: Mapping[str, Any], beside: Mapping[str, Any]) -> HFAround | None:
        return None


def test_a_plugin_that_only_knows_the_folder_takes_part_in_its_import() -> None:
    enabled = {"around": SimpleNamespace(cls=Around, provides=())}
    setup: Any = SimpleNamespace(hooks=SimpleNamespace(enabled=enabled))
    assert _makers(setup)[0] == {"around"}

"""Where classes of transformers can be cut, and why others can't."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_train_plugins.models._hf.build import _inputs
from forge_train_plugins.models._hf.stages import Staging, separable, staged

pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]
PLAN = {"embed_tokens": [], "layers": [], "norm": []}


class Layer(nn.Module):
    def __init__(self, does: str) -> None:
        super().__init__()
        self.does = does
        self.proj = nn.Linear(4, 4)

    def forward(self, hidden_states: Tensor, beside: Tensor | None = None) -> Any:
        out: Tensor = self.proj(hidden_states)
        out = out if beside is None else out + beside
        return (out, None) if self.does == "tuple" else out


class Tiny(nn.Module):
    """A class whose forward may do what a pipeline can't."""

    def __init__(self, does: str, plan: dict[str, Any]) -> None:
        super().__init__()
        text = SimpleNamespace(base_model_pp_plan=plan)
        self.config = SimpleNamespace(_attn_implementation="eager", get_text_config=lambda: text)
        self.embed_tokens, self.norm = nn.Embedding(8, 4), nn.LayerNorm(4)
        self.layers = nn.ModuleList([Layer(does) for _ in range(3)])
        self.does = does

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> tuple[Tensor]:
        first = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = first * 2
        for at, layer in enumerate([*self.layers, *self.layers] if self.does == "twice" else self.layers):
            given: dict[str, Any] = {}
            if self.does == "beside" and at:
                given["beside"] = self.layers[0].proj(first)  # type: ignore[union-attr,operator]
            if self.does == "ids" and input_ids is not None:
                given["beside"] = input_ids[..., None]
            if self.does == "scales" and at:
                hidden = hidden * 2
            out = layer(hidden, **given)
            hidden = out[0] if isinstance(out, tuple) else out
        return (self.norm(hidden),)


def found(does: str, plan: dict[str, Any] = PLAN) -> Staging | str:
    with torch.device("meta"):
        model = Tiny(does, plan)
    staging = staged(model)
    return separable(model, staging, _inputs()) if isinstance(staging, Staging) else staging


def test_a_class_is_cut_between_the_layers_of_its_plan() -> None:
    assert found("") == ""


@pytest.mark.parametrize(
    ("does", "text"),
    [
        ("beside", "passes its layers more than hidden states: a result of .*layers.0.proj"),
        ("ids", "passes its layers other arguments if it is given no token ids"),
        ("scales", "changes the hidden states between two layers"),
        ("tuple", "has layers that return more than hidden states"),
        ("twice", "does not call each of its layers once, in order"),
    ],
)
def test_what_passes_between_layers_is_named(does: str, text: str) -> None:
    answer = found(does)
    assert isinstance(answer, str)
    assert re.search(text, answer), answer


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({}, "Tiny of transformers declares no base_model_pp_plan"),
        ({"embed_tokens": [], "layers": []}, "the base_model_pp_plan of Tiny of transformers leaves norm out"),
        ({"embed_tokens": [], "norm": []}, "must name one list of layers"),
    ],
)
def test_what_a_plan_lacks_is_named(plan: dict[str, Any], text: str) -> None:
    answer = found("", plan)
    assert isinstance(answer, str)
    assert text in answer

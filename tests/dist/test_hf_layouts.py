"""Models of transformers on several ranks: `forge verify` agrees with one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import hf_models
from crossed import few, marked
from forge_train import ConfigError
from forge_train_tools.configuration.request import Request
from forge_train_tools.testing import Verifier
from hf_layouts import LAYOUTS, Foreign

pytest.importorskip("transformers")
pytestmark = [pytest.mark.dist]
TIED = (("tie_word_embeddings", True),)
SPARSE = (("num_experts", 16), ("num_experts_per_tok", 1))
"""Some experts are given no token."""
CASES = [
    Foreign("gpt_neox", "dp2", documents=True),
    Foreign("mamba", "dp2"),
    Foreign("glm", "dp2, ddp, bf16"),
    Foreign("stablelm", "dp2, ac, compile"),
    Foreign("opt", "hsdp2×2", documents=True),
    Foreign("cohere", "tp2"),
    Foreign("glm", "tp2", documents=True),
    Foreign("exaone4", "cp2"),
    Foreign("cohere", "pp2", documents=True, changes=TIED),
    Foreign("cohere2", "pp2, zbv, ac"),
    Foreign("glm", "pp2×dp2", documents=True),
    Foreign("cohere", "pp2×tp2", changes=TIED),
    Foreign("olmoe", "ep2", documents=True, changes=SPARSE),
    Foreign("olmoe", "ep2, zero1, ac"),
    Foreign("olmoe", "ep3", changes=(("num_experts", 6),)),
    Foreign("olmoe", "ep2×dp2"),
    Foreign("olmoe", "ep2 over tp2, 11 tokens", documents=True, changes=SPARSE),
    Foreign("qwen2_moe", "ep2×tp2, whole sequences", changes=SPARSE),
    Foreign("glm4_moe", "ep2×cp2", documents=True),
    Foreign("glm4_moe", "ep2×pp2", documents=True),
    Foreign("deepseek_v3", "ep2 over tp2×pp2"),
]
EXTENDED = (
    *("opt, hsdp2×2, documents", "glm, tp2, documents", "glm, pp2×dp2, documents", "cohere, pp2×tp2"),
    *("olmoe, ep2, documents", "olmoe, ep3", "olmoe, ep2×dp2", "glm4_moe, ep2×pp2, documents"),
    *("olmoe, ep2, zero1, ac", "qwen2_moe, ep2×tp2, whole sequences"),
)
"""CI has these axes alone, or among others."""


@pytest.mark.parametrize("case", marked(CASES, EXTENDED), ids=str)
def test_a_layout_agrees(verify: Verifier, case: Foreign) -> None:
    verdict = verify(case.request(), case.world, steps=2, reference=case.reference())
    assert verdict.agree, verdict


@pytest.mark.parametrize(
    ("kind", "layout", "text"),
    [
        ("bloom", "tp2", "BloomModel of transformers declares no base_model_tp_plan"),
        ("mamba", "cp2", "shows no attention kernel"),
        ("gpt_oss", "cp2", "GptOssForCausalLM needs sinks, which plugin 'sdpa' does not support"),
        ("cohere", "ep2", "CohereModel of transformers declares no base_model_ep_plan; set parallel.ep = 1"),
        ("olmoe", "ep3", "parallel.ep = 3 does not divide the 4 experts"),
        ("olmoe", "ep2×pp2", "OlmoeModel of transformers declares no base_model_pp_plan; set parallel.pp = 1"),
        ("bloom", "pp2", "BloomModel of transformers declares no base_model_pp_plan; set parallel.pp = 1"),
    ],
)
def test_what_a_class_does_not_declare_is_named(verify: Verifier, kind: str, layout: str, text: str) -> None:
    case = Foreign(kind, layout)
    with pytest.raises(ConfigError, match=text):
        verify(case.request(), case.world, steps=1)


@pytest.mark.parametrize("layout", marked(["dp2", "tp2", "cp2", "pp2"], ["dp2", "tp2", "pp2"]))
def test_masks_of_dropout_are_the_same_on_every_layout(verify: Verifier, layout: str) -> None:
    plugins, more = LAYOUTS[layout]
    model = {"set": {**hf_models.MODELS["gpt_neox"], "hidden_dropout": 0.3}}

    def request(plugins: tuple[str, ...], more: Mapping[str, Mapping[str, Any]]) -> Request:
        sections = hf_models.sections("gpt_neox", hf=model, **more)
        return Request(plugins=(*hf_models.PLUGINS, *plugins), without=hf_models.WITHOUT, sections=sections)

    verdict = verify(request(plugins, more), 2, steps=2, reference=request((), {}))
    assert verdict.agree, verdict


@pytest.mark.parametrize(
    ("kind", "layout"),
    few([("cohere", "tp2"), ("glm", "dp2"), ("arcee", "pp2")], [("cohere", "tp2"), ("arcee", "pp2")]),
)
def test_adapters_of_an_outside_plugin_work_on_a_class(verify: Verifier, kind: str, layout: str) -> None:
    case = Foreign(kind, layout)
    sections = {"adapters": {"linears": r"(q_proj|o_proj|down_proj)", "norms": "input_layernorm"}}

    def adapted(request: Request) -> Request:
        plugins = (*request.plugins, "adapter_cases:Adapters")
        return replace(request, plugins=plugins, sections={**request.sections, **sections})

    verdict = verify(adapted(case.request()), case.world, steps=2, reference=adapted(case.reference()))
    assert verdict.agree, verdict

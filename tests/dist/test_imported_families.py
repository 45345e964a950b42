"""Models of transformers, imported onto several ranks: two steps are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossed import marked
from family_layouts import EXPERTS, FAMILIES, LAYOUTS, Imported, product
from forge_train_tools.testing import Verifier

pytest.importorskip("transformers")
pytestmark = [pytest.mark.dist]
CASES = [
    Imported("llama", "tp2×dp2"),
    Imported("mistral", "cp2"),
    Imported("qwen2", "pp2"),
    Imported("qwen3", "cp2"),
    Imported("olmo2", "tp2×dp2"),
    Imported("olmo3", "pp2"),
    Imported("smollm3", "cp2"),
    Imported("granite", "pp2"),
    Imported("gemma2", "tp2×dp2"),
    Imported("gemma3", "cp2"),
    Imported("mixtral", "tp2×dp2"),
    Imported("qwen3_moe", "ep2"),
    Imported("olmoe", "pp2"),
    Imported("phi3", "tp2×dp2"),
    Imported("gpt2", "pp2"),
    Imported("gpt2", "cp2"),
    Imported("gpt_oss", "ep2"),
    Imported("deepseek_v2", "cp2"),
    Imported("deepseek_v3", "ep2"),
    Imported("deepseek_v3", "pp2"),
]
"""Of the product, which `make verify-all ARGS=families` takes whole."""


EXTENDED = (
    *("qwen3, cp2", "gemma3, cp2", "mistral, cp2", "deepseek_v2, cp2", "olmo3, pp2", "olmo2, tp2×dp2"),
    *("smollm3, cp2", "granite, pp2", "gemma2, tp2×dp2", "mixtral, tp2×dp2", "qwen3_moe, ep2", "phi3, tp2×dp2"),
    *("gpt2, pp2", "deepseek_v3, pp2", "deepseek_v3, ep2", "olmoe, pp2"),
)
"""Every layout is in CI, and every family on one process, in tests/plugins."""


@pytest.mark.parametrize("case", marked(CASES, EXTENDED), ids=str)
def test_an_imported_model_trains_as_on_one_process(verify: Verifier, composition_file: Path, case: Imported) -> None:
    verdict = verify(case.request(composition_file), case.world, steps=2, reference=case.reference(composition_file))
    assert verdict.agree, verdict


def test_every_family_and_every_layout_is_among_the_cases() -> None:
    assert {case.family for case in CASES} == set(FAMILIES)
    assert {case.layout for case in CASES} == set(LAYOUTS)
    assert {case.family for case in product() if case.layout == "ep2"} == set(EXPERTS)

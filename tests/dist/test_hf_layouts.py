"""Models of transformers on several ranks: `forge verify` agrees with one process."""

from __future__ import annotations

import pytest

from forge_train import ConfigError
from forge_train.testing import Verifier
from hf_layouts import Foreign

pytest.importorskip("transformers")
pytestmark = [pytest.mark.dist]
CASES = [
    Foreign("gpt_neox", "dp2", documents=True),
    Foreign("mamba", "dp2"),
    Foreign("cohere", "tp2"),
    Foreign("glm", "tp2", documents=True),
    Foreign("exaone4", "cp2"),
]


@pytest.mark.accept("families", 2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layout_agrees(verify: Verifier, case: Foreign) -> None:
    verdict = verify(case.request(), case.world, steps=3, reference=case.reference())
    assert verdict.agree, verdict


@pytest.mark.parametrize(
    ("kind", "layout", "text"),
    [
        ("bloom", "tp2", "BloomModel of transformers declares no base_model_tp_plan"),
        ("mamba", "cp2", "shows no attention kernel"),
    ],
)
def test_what_a_class_does_not_declare_is_named(verify: Verifier, kind: str, layout: str, text: str) -> None:
    case = Foreign(kind, layout)
    with pytest.raises(ConfigError, match=text):
        verify(case.request(), 2, steps=1)

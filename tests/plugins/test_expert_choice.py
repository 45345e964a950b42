"""A `config.json` whose experts can't be chosen is refused when it is read."""

from __future__ import annotations

from typing import Any

import pytest

from forge_train import ConfigError
from forge_train_plugins.models._decoder.families import FAMILIES

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 270,
    "max_position_embeddings": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"n_group": 3}, "n_group"),
        ({"topk_group": 5}, "topk_group"),
        ({"topk_group": 1, "num_experts_per_tok": 3}, "topk_group"),
    ],
)
def test_a_choice_that_cant_be_made_is_refused(changed: dict[str, Any], named: str) -> None:
    family = FAMILIES["DeepseekV2ForCausalLM"]
    assert family.read(SIZES)["moe"]["top_groups"] == 2
    with pytest.raises(ConfigError, match=f"^config.json: {named} = "):
        family.read(SIZES | changed)

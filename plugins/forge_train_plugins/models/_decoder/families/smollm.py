"""SmolLM 3: some layers have no positions (arXiv:2501.18795)."""

from __future__ import annotations

from .family import ATTENTION_BIAS, MLP_BIAS, Family, Key
from .positions import Rotation, Windows
from .reader import Reader

ROTATION = Rotation(2e6, skipping=True)


def _without_positions(config: Reader, layers: int) -> tuple[bool, ...]:
    return tuple(not one for one in ROTATION.with_positions(config, layers))


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "smollm3",
    keys={**ATTENTION_BIAS, **MLP_BIAS, "tie_word_embeddings": Key(("tied",), bool, True)},
    kv_heads=4,
    rotation=ROTATION,
    windows=Windows(_without_positions, missing=None, switch=True),
    ignored=("pretraining_tp", "max_window_layers"),
)

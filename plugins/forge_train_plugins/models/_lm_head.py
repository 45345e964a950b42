"""The module of the `lm_head` plugin."""

from __future__ import annotations

from forge_train.nn import Linear, TensorStyle


class LMHead(Linear):
    """Hidden states `[…, dim]` → logits `[…, vocabulary]`, one product without a bias."""

    def tensor_plan(self) -> dict[str, TensorStyle]:
        return {"": "logits"}

"""Values of a model's `generation_config.json` that generation does not follow."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_train.base.errors import brief
from forge_train_kit import model_files
from forge_train_kit.data.tokenizers.special import GENERATION_CONFIG, table

from .sampling import Sampling

log = logging.getLogger("forge_train")

_USUAL = Sampling()
_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OTHERS: dict[str, Any] = {
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("typical_p", "guidance_scale", "num_beams"), 1),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), None),
}
"""Values without an option, and what they are in `transformers` where no file says it."""


def tell_unused(path: Path, sampling: Sampling) -> None:
    """Warn, in one line, of values that `transformers` would write another text with. Options that the caller changed
    are no surprise, nor is how tokens are drawn where the likeliest one is taken.

    Args:
        path: a checkpoint, or a folder in Hugging Face layout.
        sampling: the rule that is followed instead.

    Raises:
        ConfigError: the file can't be read.
    """
    files = model_files.files(path / model_files.FOLDER) or model_files.files(path)
    if (file := files.get(GENERATION_CONFIG)) is None:
        return
    followed = _OPTIONS if sampling.temperature else ("repetition_penalty",)
    usual = {name: getattr(_USUAL, name) for name in followed if getattr(sampling, name) == getattr(_USUAL, name)}
    found = table(file)
    unused = (
        (_differing(found, usual), "give them as options"),
        (_differing(found, _OTHERS), "there is no such option"),
    )
    if parts := [f"{values} ({advice})" for values, advice in unused if values]:
        log.warning("%s: not used: %s.", file, "; ".join(parts))


def _differing(found: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {brief(repr(found[name]), 60)}"
        for name, value in usual.items()
        if found.get(name) is not None and found[name] != value
    )

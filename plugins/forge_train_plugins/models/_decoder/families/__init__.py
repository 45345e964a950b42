"""Model families: each is a table that translates between a `config.json` and the sections of a configuration."""

from __future__ import annotations

from .deepseek import DEEPSEEK2, DEEPSEEK3
from .family import Family
from .gemma import GEMMA, GEMMA2, GEMMA3
from .gpt2 import GPT2
from .gpt_oss import GPT_OSS
from .granite import GRANITE
from .llama import LLAMA, MISTRAL, MLLAMA
from .mixtral import MIXTRAL
from .olmo import OLMO2, OLMO3, OLMOE
from .phi import PHI3
from .qwen import QWEN2, QWEN3, QWEN3_MOE
from .smollm import SMOLLM3

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        LLAMA,
        MLLAMA,
        QWEN3,
        QWEN2,
        MISTRAL,
        OLMO2,
        OLMO3,
        SMOLLM3,
        GRANITE,
        GEMMA,
        GEMMA2,
        GEMMA3,
        MIXTRAL,
        QWEN3_MOE,
        OLMOE,
        DEEPSEEK2,
        DEEPSEEK3,
        PHI3,
        GPT2,
        GPT_OSS,
    )
}
"""In the order in which an export tries them."""

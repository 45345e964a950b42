"""Files with quantised weights: what makes plain ones of them, by the `quantization_config` of a `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forge_train import ConfigError
from forge_train.state_map import Dequantise, StateMap

from .reader import Reader

KEY = "quantization_config"


def _fp8(config: Reader) -> StateMap:
    """Blocks of fp8 with a scale each, as DeepSeek-V3 and Qwen3 are published (arXiv:2412.19437, §3.3)."""
    import torch

    config.one_of("fmt", {"e4m3": ""}, "e4m3")
    config.one_of("activation_scheme", {"dynamic": ""}, "dynamic")
    block = config.get("weight_block_size")
    if not isinstance(block, list) or [type(size) for size in block] != [int, int] or min(block) < 1:
        config.refuse("weight_block_size", "expected two numbers greater than 0")
    config.skip("modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize")
    rows, columns = block
    return Dequantise("{name*}.weight", "{name*}.weight_scale_inv", torch.float32, (rows, columns))


METHODS: dict[str, Callable[[Reader], StateMap]] = {"fp8": _fp8}
"""`quant_method` → how its files are read."""


def taken_out(table: Mapping[str, Any]) -> tuple[dict[str, Any], StateMap | None]:
    """A `config.json` without its `quantization_config`, and what makes plain tensors of quantised ones.

    Raises:
        ConfigError: for a method, or a variety of it, that is not known.
    """
    rest, found = {key: value for key, value in table.items() if key != KEY}, table.get(KEY)
    if not found:
        return rest, None
    if not isinstance(found, Mapping) or found.get("quant_method") not in METHODS:
        known = ", ".join(METHODS)
        raise ConfigError(
            f"config.json: {KEY} = {str(found)[:60]} can't be imported: known methods are {known}; dequantise the "
            "weights first."
        )
    config = Reader(found, f"{KEY}.")
    config.skip("quant_method")
    made = METHODS[found["quant_method"]](config)
    config.refuse_the_rest()
    return rest, made

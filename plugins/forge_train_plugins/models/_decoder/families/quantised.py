"""Maps that dequantise a folder's weights, chosen by the `quantization_config` of its `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forge_train import ConfigError
from forge_train_kit.state_map import Dequantise, DequantiseMXFP4, StateMap, Together, Transpose

from .reader import Reader

KEY = "quantization_config"


def _fp8(config: Reader) -> StateMap:
    """fp8 blocks with one scale each, as in the published DeepSeek-V3 and Qwen3 (arXiv:2412.19437, §3.3)."""
    import torch

    config.one_of("fmt", {"e4m3": ""}, "e4m3")
    config.one_of("activation_scheme", {"dynamic": ""}, "dynamic")
    block = config.get("weight_block_size")
    if not isinstance(block, list) or [type(size) for size in block] != [int, int] or min(block) < 1:
        config.refuse("weight_block_size", "expected two numbers greater than 0")
    config.skip("modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize")
    rows, columns = block
    return Dequantise("{name*}.weight", "{name*}.weight_scale_inv", torch.float32, (rows, columns))


def _mxfp4(config: Reader) -> StateMap:
    """Experts in packed fp4, as in the published GPT-OSS, with matrices stored as `[out, in]`."""
    import torch

    config.skip("modules_to_not_convert", "dequantize")
    fused = tuple(f"{{name*}}.experts.{one}_proj" for one in ("gate_up", "down"))
    packed = (DequantiseMXFP4(f"{one}_blocks", f"{one}_scales", one, torch.bfloat16) for one in fused)
    return Together(tuple(packed)) >> Transpose(fused, (1, 2))


METHODS: dict[str, Callable[[Reader], StateMap]] = {"fp8": _fp8, "mxfp4": _mxfp4}
"""`quant_method` → how its files are read."""


def taken_out(table: Mapping[str, Any]) -> tuple[dict[str, Any], StateMap | None]:
    """A `config.json` without its `quantization_config`, and the map that dequantises its tensors.

    Raises:
        ConfigError: for an unknown method or an unknown variant of one.
    """
    rest, found = {key: value for key, value in table.items() if key != KEY}, table.get(KEY)
    if not found:
        return rest, None
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json: {KEY}: expected an object, found {type(found).__name__}.")
    method = str(found.get("quant_method") or ("bitsandbytes" if "load_in_8bit" in found else "not named"))
    if method not in METHODS:
        raise ConfigError(
            f"config.json: {KEY} = {{quant_method: {method}, …}} can't be imported; known methods are "
            f"{', '.join(METHODS)}. Take the model that these weights were made from, or dequantise them."
        )
    config = Reader(found, f"{KEY}.")
    config.skip("quant_method")
    made = METHODS[method](config)
    config.refuse_the_rest()
    return rest, made

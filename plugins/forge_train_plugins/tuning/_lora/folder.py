"""A folder of PEFT that a run begins with. Importing this module imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (None, False),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
}
"""Key of `adapter_config.json` → the values that are understood here."""


class Folder:
    """An adapter as PEFT stores it.

    Raises:
        ConfigError: for what is no such folder, and for an adapter that `lora` can't express.
    """

    def __init__(self, path: str) -> None:
        self.path, file = Path(path), Path(path) / "adapter_config.json"
        self.tensors = self.path / "adapter_model.safetensors"
        if missing := next((one for one in (file, self.tensors) if not one.is_file()), None):
            raise ConfigError(f"lora.adapter: there is no {missing}.", key="lora.adapter")
        try:
            self.config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"lora.adapter: {file} is not JSON: {error}.", key="lora.adapter") from error
        for key, values in PLAIN.items():
            if (found := self.config.get(key)) not in values:
                raise ConfigError(
                    f"lora.adapter: {file}: {key} is {found!r}, which lora can't continue.", key="lora.adapter"
                )

    @property
    def implied(self) -> dict[str, Any]:
        """Options that follow from it."""
        keys = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora"}
        return {f"lora.{own}": self.config[key] for own, key in keys.items() if key in self.config}

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Names, in Hugging Face layout, of the linears that it updates."""
        from safetensors import safe_open

        with safe_open(self.tensors, "pt") as file:
            names = [*file.keys()]
        ends = (".lora_A.weight", ".lora_B.weight")
        if odd := [name for name in names if not (name.startswith(PREFIX) and name.endswith(ends))]:
            raise ConfigError(
                f"lora.adapter: {self.tensors} holds {odd[0]!r}, which lora can't continue.", key="lora.adapter"
            )
        return tuple(name.removeprefix(PREFIX).removesuffix(ends[0]) for name in names if name.endswith(ends[0]))

    def read(self, module: str, factor: str) -> Tensor:
        """A factor of a linear's update, in fp32."""
        from safetensors import safe_open

        with safe_open(self.tensors, "pt") as file:
            found: Tensor = file.get_tensor(f"{PREFIX}{module}.{factor}.weight").float()
        return found

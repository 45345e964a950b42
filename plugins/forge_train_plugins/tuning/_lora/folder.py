"""A folder of PEFT that a run begins with. Importing this module imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
FACTOR = re.compile(re.escape(PREFIX) + r"(.+)\.lora_(?:([AB])\.weight|embedding_([AB])|(magnitude)_vector)")
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),  # others change the base
}
"""Key of `adapter_config.json` → the values that are understood here."""
READ = (
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "lora_dropout",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "modules_to_save",
)
OPTIONS = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora", "dropout": "lora_dropout"}
"""Option of `lora` → key of `adapter_config.json`."""
HARMLESS = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the tensors have their names
    *("megatron_config", "megatron_core", "eva_config", "runtime_config", "qalora_group_size"),
)
"""Keys that change nothing of what the tensors mean. Any other one must be empty."""


class Folder:
    """An adapter as PEFT stores it.

    Raises:
        ConfigError: for what is no such folder, and for an adapter that `lora` can't express.
    """

    def __init__(self, path: str, key: str = "lora.adapter") -> None:
        self.path, self.key, file = Path(path), key, Path(path) / "adapter_config.json"
        self.tensors = self.path / "adapter_model.safetensors"
        if missing := next((one for one in (file, self.tensors) if not one.is_file()), None):
            raise ConfigError(f"{key}: there is no {missing}.", key=key)
        try:
            self.config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{key}: {file} is not JSON: {error}.", key=key) from error
        if key == "lora.beneath" and self.config.get("use_dora"):
            raise ConfigError(f"{key}: {self.path} has magnitudes (DoRA), which only lora.adapter continues.", key=key)
        self.saved: tuple[str, ...] = tuple(self.config.get("modules_to_save") or ())
        """Ends of the names of modules that it holds in full, instead of updates."""
        if key == "lora.beneath" and self.saved:
            raise ConfigError(
                f"{key}: {self.path} has modules in full (modules_to_save), which only lora.adapter continues.", key=key
            )
        self.parameters: tuple[str, ...] = tuple(self.config.get("target_parameters") or ())
        """Ends of the names of parameters that it updates: stacks of experts."""
        for name, values in PLAIN.items():
            if (found := self.config.get(name)) not in values:
                raise self._unknown(name, found)
        for name in self.config.keys() - {*PLAIN, *READ, *HARMLESS}:
            if self.config[name]:
                raise self._unknown(name, self.config[name])

    @property
    def implied(self) -> dict[str, Any]:
        """Options that follow from it."""
        return {f"lora.{own}": self.config[key] for own, key in OPTIONS.items() if self.config.get(key) is not None}

    @cached_property
    def _found(self) -> dict[str, re.Match[str] | None]:
        with self._open() as file:
            return {name: FACTOR.fullmatch(name) for name in file.keys()}  # noqa: SIM118 — no mapping

    @cached_property
    def _names(self) -> dict[tuple[str, str], str]:
        """Module and factor, `A`, `B` or `magnitude` → name of the tensor."""
        found = self._found
        # PEFT adds the base's weights of an embedding, and then of the head, that it updates.
        copies = {f"{PREFIX}{match[1]}.base_layer.weight" for match in found.values() if match is not None}
        whole = {f"{PREFIX}{name}" for name in self.full}
        if odd := [name for name, match in found.items() if match is None and name not in {*copies, *whole}]:
            raise ConfigError(f"{self.key}: {self.tensors} holds {odd[0]!r}, which lora can't continue.", key=self.key)
        return {
            (match[1], match[2] or match[3] or match[4]): name for name, match in found.items() if match is not None
        }

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules, named as in PEFT, that have an update."""
        return tuple(module for module, factor in self._names if factor == "A")

    def saves(self, module: str) -> bool:
        """Return True for a module that it holds in full, by itself or in another one; PEFT compares ends of names."""
        around = accumulate(module.split("."), "{}.{}".format)
        return bool(self.saved) and any(one.endswith(self.saved) for one in around)

    @property
    def full(self) -> tuple[str, ...]:
        """Parameters, named as in PEFT, of the modules that it holds in full."""
        names = (name.removeprefix(PREFIX) for name, match in self._found.items() if match is None)
        return tuple(name for name in names if self.saves(name.rpartition(".")[0]))

    def read_full(self, name: str) -> Tensor:
        """A parameter of a module that it holds in full."""
        if f"{PREFIX}{name}" not in self._found:
            raise ConfigError(f"{self.key}: {self.tensors} holds no {name!r}.", key=self.key)
        with self._open() as file:
            found: Tensor = file.get_tensor(f"{PREFIX}{name}")
        return found

    def read(self, module: str, factor: str) -> Tensor:
        """A factor of an update, `A` or `B`, or its `magnitude`, in fp32."""
        if (name := self._names.get((module, factor))) is None:
            raise ConfigError(f"{self.key}: {self.tensors} holds no {factor} of {module!r}.", key=self.key)
        with self._open() as file:
            found: Tensor = file.get_tensor(name).float()
        return found

    def _open(self) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.tensors, "pt")
        except SafetensorError as error:
            raise ConfigError(f"{self.key}: {self.tensors} is no whole file: {error}.", key=self.key) from error

    def size(self, name: str) -> tuple[int, float]:
        """Rank and alpha of the update of a module or a parameter."""
        return int(self._sized("rank_pattern", "r", name)), self._sized("alpha_pattern", "lora_alpha", name)

    def _sized(self, patterns: str, key: str, name: str) -> float:
        table: Mapping[str, float] = self.config.get(patterns) or {}
        hits = (value for one, value in table.items() if re.match(rf"(.*\.)?({one})$", name))
        return next(hits, self.config.get(key, 8))

    def _unknown(self, name: str, value: Any) -> ConfigError:
        where = self.path / "adapter_config.json"
        return ConfigError(f"{self.key}: {where}: {name} is {value!r}, which lora can't continue.", key=self.key)

"""The updates as PEFT stores them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from forge_train import ConfigError
from forge_train_kit.hf import HFAdapter
from forge_train_kit.state_map import StateMap, Step

from .folder import PREFIX
from .sizes import chosen


@dataclass(frozen=True)
class Factors(StateMap):
    """Gives both factors of each linear under PEFT's names.

    Args:
        modules: linear → its name in Hugging Face layout.
    """

    modules: Mapping[str, str]

    def apply(self, step: Step) -> None:
        for name in [one.removesuffix(".lora_A") for one in step.tensors if one.endswith(".lora_A")]:
            if name not in self.modules:
                step.wrong.append(
                    f"{name}: its weight has no tensor of its own in Hugging Face layout; export the merged model"
                )
                continue
            for factor in ("lora_A", "lora_B"):
                for view in step.take(f"{name}.{factor}"):
                    step.give(f"{PREFIX}{self.modules[name]}.{factor}.weight", view)

    def inverse(self) -> NoReturn:
        raise ConfigError("lora: the factors of a folder are not renamed back.")


def adapter(config: Any, linears: list[str], modules: Mapping[str, str]) -> HFAdapter:
    """The adapter of these linears; those without a module are named when the map is applied."""
    named = {name: modules[name] for name in linears if name in modules}
    sizes = {theirs: chosen(config, name) for name, theirs in named.items()}
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": _targets(set(named.values()), set(modules.values())),
        # Their keys are patterns.
        "rank_pattern": {re.escape(name): rank for name, (rank, _) in sizes.items() if rank != config.rank},
        "alpha_pattern": {re.escape(name): alpha for name, (_, alpha) in sizes.items() if alpha != config.alpha},
    }
    return HFAdapter(Factors(modules), described)


def _targets(adapted: set[str], known: set[str]) -> list[str]:
    """The last parts of the names, if these name no other module; else the whole names."""
    ends = {name.rpartition(".")[2] for name in adapted}
    others = {name.rpartition(".")[2] for name in known - adapted}
    return sorted(adapted if ends & others else ends)

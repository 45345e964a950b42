"""Twenty faults, each planted on the layout alone: `forge verify` finds it, says in which part, and what it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import compositions
from forge_train.config import Request
from forge_train.testing import Verifier

pytestmark = [pytest.mark.dist, pytest.mark.accept("trial", 17), pytest.mark.accept("dist", 1), pytest.mark.timeout(300)]

WARM = {"train.steps": 10_000, "cosine.warmup": 2000}
"""The first steps' learning rates are next to nothing."""
EXPERTS = {"moe.experts": 8, "moe.hidden": 16, "moe.balance": 0, "train.global_batch": 8, "train.micro_batch": 2}
TP2, EP2 = {"parallel.tp": 2}, {"parallel.ep": 2}


@dataclass(frozen=True)
class Fault:
    """A plugin that does one thing wrong."""

    plugin: str
    instead: str = ""
    """The plugin whose place it takes."""
    parts: set[str] = field(default_factory=set)
    """What must differ, and nothing else may."""
    says: str = ""
    layout: tuple[str, ...] = ("fsdp2",)
    settings: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    """Plugins of both sides."""
    world: int = 2
    steps: int = 3

    def request(self, file: Path) -> Request:
        name = self.plugin.partition(":")[2]
        section = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("late_tp", "late_tp")
        section = {"DoubledFSDP": "doubled_fsdp", "ForgetfulTP": "forgetful_tp"}.get(name, section)
        if self.instead in ("text",):
            text = file.read_text(encoding="utf-8").replace('"text"', f'"{self.plugin}"')
            file = file.with_name(f"{section}.toml")
            file.write_text(text.replace("[text]", f"[{section}]"), encoding="utf-8")
        plugins = [self.plugin if one == self.instead else one for one in (*self.layout, *self.also)]
        if self.plugin not in plugins and self.instead != "text":
            plugins.append(self.plugin)
        defaults = {"train.global_batch": 12, "train.micro_batch": 2, "train.evaluate_every": 2}
        settings = {re.sub(rf"^{self.instead}\.", f"{section}.", key): value for key, value in self.settings.items()}
        request = compositions._request(file, plugins, {**defaults, **settings})
        return replace(request, without=("console", "tensorboard"))


SLOW = {"parts": {"updates"}, "settings": WARM}
FAULTS: dict[str, Fault] = {
    "gradients, on average": Fault(
        "sabotage:DoubledFSDP",
        "fsdp2",
        {"gradients", "grad_norm", "later gradients"},
        "Every gradient is 2 times what it should be: an averaging factor",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(verify: Verifier, composition_file: Path, name: str) -> None:
    fault = FAULTS[name]
    verdict = verify(fault.request(composition_file), fault.world, steps=fault.steps)
    assert verdict.failed == fault.parts, verdict
    assert any(re.search(fault.says, sentence) for sentence in verdict.advice[:1]), verdict.advice

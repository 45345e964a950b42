"""Adapters × tasks × layouts × models: each equals one process, or is refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tuning
from crossed import every_value
from forge_train.base.errors import ConfigError, ForgeError
from forge_train_tools.testing import Verifier
from forge_train_tools.verification import Check, Verdict
from tuning import Tuned

pytestmark = [pytest.mark.dist]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the cases share."""
    return tuning.write(tmp_path_factory.mktemp("tuning"))


def _pairs(case: Tuned) -> list[Any]:
    """Which two values meet: an adapter and a task, an adapter and a way to split weights. The tests of adapters and of
    tasks have them on every layout. Nothing meets `compile`, which takes
    longest, or four processes, and bf16 meets `sft`."""
    if case.refused:
        return [case.refused]
    if case.layout in ("compile", "ep2×tp2") or (case.narrow and case.task != "sft"):
        return []
    found = [case.layout, case.model, (case.adapter, case.task)]
    if case.layout in ("tp2", "fsdp2×2", "ep2"):
        found.append((case.adapter, case.layout))
    return found


@pytest.mark.parametrize("case", every_value([*tuning.product()], _pairs, lambda case: case.world), ids=str)
def test_tuning_agrees_with_one_process(verify: Verifier, file: Path, case: Tuned) -> None:
    if case.refused:
        with pytest.raises(ConfigError) as caught:
            verify(case.request(file), case.world, steps=2, reference=case.reference(file))
        assert str(caught.value).startswith(case.refused)
        return
    verdict = verify(case.request(file), case.world, steps=2, reference=case.reference(file))
    assert not case.failed(verdict), verdict


def test_what_is_not_equal_is_told_apart_from_rounding() -> None:
    def failed(task: str, layout: str, worst: float, tolerance: float = 1e-4) -> list[str]:
        checks = (Check("gradients", worst, tolerance, ""), Check("replicas", 0, 0, ""))
        return Tuned("lora", task, "decoder", layout).failed(Verdict("", ("", ""), checks, ()))

    for task, layout in (("sft", "tp2"), ("dpo", "fsdp2×2"), ("dpo", "cp2"), ("sft", "fsdp2×2, bf16")):
        assert failed(task, layout, 9e-6, 1e-3) == []
        assert failed(task, layout, 2e-5, 1e-3) == failed(task, layout, float("nan"), 1e-3) == ["gradients"]
    assert failed("sft", "fsdp2×2, bf16", 0.0, 0.03) == ["precision"]  # updates have no effect in bf16


def test_an_adapter_with_the_rows_of_one_rank_is_refused(verify: Verifier, file: Path) -> None:
    """Its checkpoint would have those of the first rank."""
    case = Tuned("lora", "sft", "decoder", "tp2")
    request = case.request(file)
    faulty = replace(request, plugins=(*request.plugins, "tuning_sabotage:OneRanksRows"))
    with pytest.raises(ForgeError, match=r"changed the shape of parameters; cut: layers\.0\.attention\.k\.lora_B, "):
        verify(faulty, 2, steps=1, reference=case.reference(file))

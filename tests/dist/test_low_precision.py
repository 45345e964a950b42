"""Low precision on several ranks: layouts round alike, and where they could not, they are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import compositions
from forge_train import ConfigError
from forge_train.config import Request
from forge_train.testing import Verifier
from forge_train.verification import Verdict, verify_against

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

MODEL = {"decoder.hidden": 64, "train.global_batch": 8, "train.micro_batch": 8}
FP8: tuple[str, ...] = ("fp8",)
ROWS = {"fp8.recipe": "rowwise"}
GATHER = {"fp8.all_gather": True}
TP2, EP2 = {"parallel.tp": 2}, {"parallel.ep": 2}
CASES: dict[str, tuple[int, tuple[str, ...], Mapping[str, Any], tuple[str, ...], Mapping[str, Any]]] = {
    # What it is: ranks; plugins and settings of both sides; what the layout adds.
    "fsdp2": (2, FP8, {}, ("fsdp2",), {}),
    "fsdp2 over three": (3, FP8, {"train.global_batch": 6, "train.micro_batch": 6}, ("fsdp2",), {"train.micro_batch": 2}),
    "tp2": (2, FP8, {}, ("tp",), TP2),
    "tp2, rowwise": (2, FP8, ROWS, ("tp",), TP2),
    "ep2": (2, ("fp8", "moe"), {}, ("ep", "fsdp2"), EP2),
    "ep2, rowwise, recomputed": (2, ("fp8", "moe"), ROWS, ("ep", "fsdp2", "ac"), EP2),
    "etp2": (2, ("fp8", "moe"), {}, ("ep", "tp"), {**TP2, "parallel.etp": 2}),
    "tp2 × fsdp2": (4, FP8, {}, ("tp", "fsdp2"), TP2),
    "ep2 × tp2 × fsdp2": (4, ("fp8", "moe"), {}, ("ep", "tp", "fsdp2"), {**TP2, **EP2}),
    "fsdp2, gathered": (2, FP8, GATHER, ("fsdp2",), {}),
    "tp2 × fsdp2, gathered": (4, FP8, {**ROWS, **GATHER}, ("tp", "fsdp2"), TP2),
    "ep2 × tp2 × fsdp2, gathered": (4, ("fp8", "moe"), GATHER, ("ep", "tp", "fsdp2"), {**TP2, **EP2}),
    "deepseek, fsdp2": (2, ("deepseek_fp8",), {"deepseek_fp8.scales": "e8m0"}, ("fsdp2",), {}),
}


@pytest.fixture
def judge(verify: Verifier, composition_file: Path) -> Any:
    def verdict(
        world: int, plugins: tuple[str, ...], settings: Mapping[str, Any], more: tuple[str, ...], layout: Any
    ) -> Verdict:
        dense = "moe" not in plugins  # a balance of experts is a matter of a micro-batch
        both = {**MODEL, "train.micro_batch": 8 if dense else 4, **settings}
        shares = {"train.micro_batch": 8 if dense and world == layout.get("parallel.tp") else 4}
        own = request(composition_file, (*plugins, *more), {**both, **shares, **layout})
        return verify(own, world, steps=3, reference=request(composition_file, plugins, both))

    return verdict


def request(file: Path, plugins: tuple[str, ...], settings: Mapping[str, Any]) -> Request:
    return compositions._request(file, plugins, settings)


@pytest.mark.accept("moe", 4)
@pytest.mark.parametrize("case", CASES)
def test_layouts_differ_by_a_tenth_of_what_low_precision_changes(judge: Any, case: str) -> None:
    verdict = judge(*CASES[case])
    assert verdict.agree, verdict
    gradients = next(check for check in verdict.checks if check.name == "gradients")
    assert 1e-3 < gradients.tolerance < 1e-1, "not a tenth of the gap of float8, but of something else"


def test_another_precision_is_compared_without_what_rounds_below_it(composition_file: Path) -> None:
    """Otherwise float8 would be compared with itself."""
    with_it, without = (request(composition_file, plugins, MODEL) for plugins in (FP8, ()))
    verdict = verify_against(with_it, "precision=fp32", steps=2)
    gradients = next(check for check in verdict.checks if check.name == "gradients")
    assert verdict.agree
    assert "unrounded" in verdict.title
    assert 1e-2 < gradients.worst < gradients.tolerance
    plain = verify_against(without, "precision=fp32", steps=2)
    assert [other for _, other in verdict.losses] == [one for one, _ in plain.losses]
    same = verify_against(with_it, "micro_batch=4", steps=2)
    assert next(check.worst for check in same.checks if check.name == "gradients") < gradients.worst / 10


def test_blocks_that_would_lie_on_two_ranks_are_refused(judge: Any) -> None:
    with pytest.raises(ConfigError, match=r"tp splits 32 features into 16 .* no whole blocks of 128"):
        judge(2, ("deepseek_fp8",), {}, ("tp",), TP2)

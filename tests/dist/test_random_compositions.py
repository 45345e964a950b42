"""The compositions that `make verify-random` draws: some of a fixed seed agree, and jitter tells noise from a fault."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import random_compositions
from crossed import marked
from forge_train_tools.configuration.request import Request
from forge_train_tools.testing import Verifier
from forge_train_tools.verification import Check, Verdict
from random_compositions import Drawn, Jitter, draw

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import verify_random

pytestmark = [pytest.mark.dist]

SEED = 1


@pytest.fixture(scope="module")
def random_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_compositions.write(tmp_path_factory.mktemp("random"))


@pytest.mark.parametrize("number", marked([1, 5, 6], [1, 6]))
def test_random_compositions_agree(verify: Verifier, random_file: Path, number: int) -> None:
    one = draw(SEED, number, most=2)
    verdict = verify(one.request(random_file), one.world, steps=2, reference=one.reference(random_file))
    assert verdict.agree, f"{one}: {verdict}"


def test_a_number_of_a_seed_is_always_the_same() -> None:
    assert draw(SEED, 5) == draw(SEED, 5)
    assert len({str(draw(SEED, number)).partition(":")[2] for number in range(50)}) == 50


@pytest.mark.extended
def test_jitter_is_as_coarse_as_the_precision(random_file: Path) -> None:
    """Rounding errors of fp32 vanish where weights are rounded to bf16: they would call every difference a fault."""
    one = draw(SEED, 4, most=2).reference(random_file)
    moved = [Jitter.measure(with_precision(one, precision), 2).moved["loss"] for precision in ("fp32", "bf16")]
    assert moved[0] < 1e-5 < moved[1] < 1e-2


def with_precision(request: Request, precision: str) -> Request:
    return dataclasses.replace(request, set=(*request.set, f"train.precision={precision}"))


def test_noise_is_told_from_a_fault() -> None:
    jitter = Jitter(dict.fromkeys(random_compositions.NOISY.values(), 1e-4))

    def explained(name: str, worst: float) -> bool:
        return jitter.explains(Verdict("", ("", ""), (Check(name, worst, 1e-5, ""),), ()))

    assert explained("loss", 2e-4)
    assert not explained("loss", 4e-4)
    assert not explained("checkpoint", 1)
    assert not explained("updates", 2e-4)


@pytest.mark.extended
def test_a_reward_in_bf16_moves_no_further_on_a_layout_than_by_jitter(verify: Verifier, random_file: Path) -> None:
    """Ranks of tp round a sum in parts: the first loss differs as if weights had been rounded otherwise."""
    settings = {"moe.experts": 12, "moe.top_k": 3, "moe.hidden": 16, "moe.router": "sigmoid", "run.seed": 3}
    settings |= {"train.precision": "bf16", "train.global_batch": 8, "train.micro_batch": 4, "decoder.layers": 2}
    model = {"plugins": ("reward", "text_pairs", "moe"), "text_pairs.template": "plain", **settings}
    layout = {"plugins": ("pp", "tp", "ep"), "parallel.pp": 2, "parallel.tp": 2, "parallel.etp": 2}
    one = Drawn(0, 0, 4, layout, model)
    verdict = verify(one.request(random_file), 4, steps=2, reference=one.reference(random_file))
    moved = Jitter.measure(one.reference(random_file), 2).moved["loss"]
    first, found = verdict.losses[0]
    assert not verdict.failed, verdict
    assert abs(first - found) < random_compositions.MARGIN * moved * first


FP16 = {"train.precision": "fp16", "train.global_batch": 8, "train.micro_batch": 2, "decoder.layers": 2}
FP16 |= {"moe.experts": 4, "moe.hidden": 16, "moe.top_k": 2, "loss_scaler.growth": 1, "loss_scaler.initial": 2.0**18}


def in_fp16(verify: Verifier, file: Path, seed: int, steps: int, plugins: tuple[str, ...], axis: str) -> Verdict:
    layout = {"plugins": plugins, f"parallel.{axis}": 2}
    one = Drawn(0, 0, 2, layout, {"plugins": ("moe",), "run.seed": seed, "moe.normalise": True, **FP16})
    return verify(one.request(file), 2, steps=steps, reference=one.reference(file))


def test_an_overflow_on_one_side_of_cp_is_named_and_no_fault(verify: Verifier, random_file: Path) -> None:
    """One process sums over the whole sequence, each rank over half of it."""
    verdict = in_fp16(verify, random_file, 3, 5, ("cp",), "cp")
    assert verdict.agree, verdict
    assert "At step 4 the gradients overflow fp16 on one process alone" in verdict.advice[0]
    assert {check.name for check in verdict.checks} >= {"loss", "grad_norm", "later gradients", "updates"}


def test_an_experts_tokens_of_two_ranks_may_be_rounded_together(verify: Verifier, random_file: Path) -> None:
    verdict = in_fp16(verify, random_file, 1, 2, ("fsdp2", "ep"), "ep")
    assert verdict.agree, verdict


def test_a_run_goes_on_with_its_outcomes_and_tries_again_what_was_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[int, int]] = []

    def judge(one: Drawn, *_: Any) -> tuple[str, str]:
        tried.append((one.seed, one.number))
        return ("refused", "p: 3 are too many") if one.number == 0 else ("agrees", "")

    outcomes = tmp_path / "outcomes.jsonl"
    kinds = {0: "within jitter", 1: "at fault", 2: "agrees"}
    lines = [{"seed": 7, "number": n, "kind": kind, "says": f"{n}: it", "seconds": 60} for n, kind in kinds.items()]
    outcomes.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    monkeypatch.setattr(verify_random, "judge", judge)
    monkeypatch.setattr(verify_random, "RESULTS", tmp_path)
    command = ["verify_random.py", "--seed", "7", "8", "--count", "3", "--outcomes", str(outcomes)]
    monkeypatch.setattr(sys, "argv", command)
    assert verify_random.main() == 0
    assert tried == [(7, 1), *((8, number) for number in range(4))]
    page = (tmp_path / "verify-random-7-8.md").read_text(encoding="utf-8")
    for row in (
        "drawn | 7",
        "refused by name | 1",
        "compared | 6",
        "agree | 5",
        "within jitter | 1",
        "**at fault** | 0",
    ):
        assert f"| {row} |" in page
    assert 'SEED="7 8"' in page
    assert "## Within jitter\n\n- seed 7, 0: it" in page
    assert "| 1 | p: … are too many |" in page

"""`forge verify`: what it finds right, and what it says of layouts that are wrong on purpose."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toys
from crossed import marked
from forge_cli import forge_process
from forge_train import ConfigError
from forge_train_tools.configuration.request import Request
from forge_train_tools.testing import Verifier
from forge_train_tools.verification import Verdict, verify_against

pytestmark = [pytest.mark.dist]
STEPS = 4
TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
Judge = Callable[..., Verdict]


def request_of(folder: Path, *plugins: str, **values: Any) -> Request:
    config = toys.write_config(folder, *(f"layouts:{name}" for name in plugins), **{"run.seed": 3, **values})
    return Request(config=str(config), without=("fsdp2", *(("toy_data",) if "RankData" in plugins else ())))


@pytest.fixture
def judge(verify: Verifier, tmp_path: Path) -> Judge:
    """As `verify`, of toys."""

    def verdict(*plugins: str, world: int = 2, **values: Any) -> Verdict:
        return verify(request_of(tmp_path, *plugins, **values), world, steps=STEPS)

    return verdict


def failed(verdict: Verdict) -> set[str]:
    return {check.name for check in verdict.checks if not check.ok}


@pytest.mark.parametrize("world", marked([2, 4], [4]))
def test_a_right_layout_agrees(judge: Judge, world: int) -> None:
    verdict = judge("Replicas", world=world, **{"train.global_batch": 8})
    assert verdict.agree, verdict
    assert verdict.advice == ()
    assert len(verdict.losses) == STEPS


def test_hybrid_replicas_agree(judge: Judge) -> None:
    verdict = judge("Replicas", "Peers", world=4, **{"parallel.tp": 2, "parallel.dp_replicate": 2})
    assert verdict.agree, verdict


def test_an_averaging_factor(judge: Judge) -> None:
    verdict = judge("Doubled")
    assert failed(verdict) >= {"gradients", "grad_norm"}
    assert {round(offender.ratio, 4) for offender in verdict.offenders} == {2.0}
    assert "Every gradient is 2 times what it should be: an averaging factor" in verdict.advice[0]
    assert "dp_shard is 2" in verdict.advice[0]


def test_an_averaging_factor_of_one_group(judge: Judge) -> None:
    verdict = judge("DoubledUps")
    assert "layers.*.up.weight (2) are 2 times" in verdict.advice[0]
    assert "that group alone" in verdict.advice[0]


def test_a_norm_left_unsynchronised(judge: Judge) -> None:
    verdict = judge("NormsLeft")
    assert failed(verdict) >= {"gradients", "replicas"}
    assert all("norm" in offender.name for offender in verdict.offenders)
    assert "layers.*.norm.weight (2) are wrong, and differ between ranks along dp_shard" in verdict.advice[0]


def test_peers_fed_different_data(judge: Judge) -> None:
    verdict = judge("Peers", "RankData", **{"parallel.tp": 2})
    assert "peers" in failed(verdict)
    assert "rank 1 and rank 0 (data-parallel rank 0)" in verdict.advice[0]
    assert "job.dist.data_rank" in verdict.advice[0]


def test_other_data_than_one_process(judge: Judge) -> None:
    verdict = judge("Replicas", "RankData")
    assert "data" in failed(verdict)
    assert "peers" not in failed(verdict)
    assert "of the global stream" in verdict.advice[0]


def test_weights_that_drift_apart(judge: Judge) -> None:
    verdict = judge("Unclipped")
    assert "replicas" in failed(verdict)
    assert "gradients" not in failed(verdict)
    assert any("along dp_shard" in sentence for sentence in verdict.advice)


def test_the_order_swapped(judge: Judge) -> None:
    with pytest.raises(ConfigError, match=r"'columns'.* matched nothing in this model"):
        judge("Columns", "TooEarly", **{"parallel.tp": 2})


def test_a_plan_entry_that_matches_nothing(judge: Judge) -> None:
    with pytest.raises(ConfigError, match="the plan's entry 'gate' matches nothing"):
        judge("Columns", **{"parallel.tp": 2, "columns.plan": ["up", "gate"]})


def test_against_another_setting(tmp_path: Path) -> None:
    verdict = verify_against(request_of(tmp_path), "adamw.lr=0.01", steps=3)
    assert failed(verdict) == {"loss"}
    assert verdict.losses[0][0] == verdict.losses[0][1]
    assert verify_against(request_of(tmp_path), "micro_batch=1", steps=3).agree


@pytest.mark.parametrize(
    ("assignment", "says"),
    [("precision", "expected key=value"), ("parallel.tp=2", "--nproc"), ("nonsense=1", "say the section too")],
)
def test_against_what_can_not_be(tmp_path: Path, assignment: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        verify_against(request_of(tmp_path), assignment)


@pytest.mark.e2e
def test_the_command(tmp_path: Path) -> None:
    """Both endings, in processes of the command's own."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'dist'}", "TMPDIR": str(tmp_path)}
    for plugin, code in (("Replicas", 0), ("Doubled", 1)):
        config = request_of(tmp_path, plugin).config
        options = ("--nproc", 2, "--steps", 2, "--without", "fsdp2", "--json")
        ended = forge_process("verify", config, *options, preloaded=True, cwd=tmp_path, env=environment)
        assert ended.code == code, ended.err
        answer = ended.json
        assert answer["agree"] is (code == 0)
        assert {"name", "worst", "tolerance", "ok"} <= answer["checks"][0].keys()
    assert not list(tmp_path.glob("forge-*")), "something was left behind"


def test_the_transcript_in_the_documentation(verify: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/docs checks the others: this one takes four ranks."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    transcripts = importlib.import_module("transcripts")

    def compare(request: Request, nproc: int, *, steps: int) -> Verdict:
        text = f"text.path={Path('texts').resolve()}"
        here = dataclasses.replace(request, config=str(Path(request.config).resolve()), set=(*request.set, text))
        return verify(here, nproc, steps=steps)

    monkeypatch.setattr("forge_train_tools.verification.verify", compare)
    page = "how-to/verify.md"
    session = dataclasses.replace(transcripts.SESSIONS[page], slow="forge verify --against")
    monkeypatch.setitem(transcripts.SESSIONS, page, session)
    transcripts.written(page, (ROOT / "docs" / page).read_text(encoding="utf-8"), quick=True)

"""The conformance suite tries transforms on two processes, where they are at work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import forge_cli
import two_ranks
import warm
from forge_train import ConfigError, Job, Phase, Plugin, Transform, hookimpl
from forge_train_tools.testing import Pool, Report, RunForge, assert_conforms, check, verifying
from forge_train_tools.verification import Verdict
from forge_train_tools.verification.routing import RoutingDifference

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SHARDED, REPLICATED = "agrees with one process (dp_shard = 2)", "agrees with one process (dp_replicate = 2)"


def detail(report: Report, name: str) -> str:
    return next(one.detail for one in report.checks if one.name == name)


def test_a_right_transform_is_verified_on_every_axis_that_it_covers(tmp_path: Path, ranks: Pool) -> None:
    report = assert_conforms(two_ranks.Averaging, strict=True, folder=tmp_path, ranks=ranks)
    assert {SHARDED, REPLICATED} <= {one.name for one in report.of("ok")}
    assert detail(report, SHARDED).startswith("loss ")


@pytest.mark.parametrize(
    ("plugin", "says"),
    [
        (two_ranks.Doubled, "Every gradient is 2 times what it should be: an averaging factor."),
        (two_ranks.Misfit, "matched nothing"),
    ],
)
def test_a_transform_that_is_wrong_on_two_ranks_fails(
    tmp_path: Path, ranks: Pool, plugin: type[Plugin], says: str
) -> None:
    report = check(plugin, folder=tmp_path, ranks=ranks)
    assert {one.name for one in report.of("fail")} == {SHARDED, REPLICATED}
    assert says in detail(report, SHARDED)


def test_what_a_tie_leaves_open_is_skipped(tmp_path: Path, ranks: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    tie = RoutingDifference(1, "experts of router", moved=1, near=1, allowed=1e-5)
    verdict = Verdict("two against one", ("1", "2"), (), (), advice=("it is a tie",), routing_difference=tie)
    monkeypatch.setattr(verifying, "verify", lambda *args, **more: verdict)
    report = check(two_ranks.Averaging, folder=tmp_path, ranks=ranks)
    assert {SHARDED, REPLICATED} <= {one.name for one in report.of("skip")}
    assert detail(report, SHARDED) == "it is a tie"


@pytest.mark.e2e
def test_the_command_starts_processes_of_its_own_and_tells_what_is_wrong() -> None:
    with warm.ranks():
        ended = forge_cli.forge("plugins", "check", "two_ranks:Doubled")
    assert ended.code == 1
    assert f"✗ {SHARDED}  " in ended.out
    assert "gradients 1 > 0.0001. Every gradient is 2 times what it should be" in ended.out


def test_a_class_that_other_processes_can_not_import_is_skipped(tmp_path: Path) -> None:
    class Inside(two_ranks.Averaging):
        """Is defined in a test."""

    report = assert_conforms(Inside, folder=tmp_path)
    assert detail(report, SHARDED) == "inside is defined in a test, out of reach for other processes"


def test_an_axis_that_can_not_be_asked_about_is_skipped(tmp_path: Path) -> None:
    class Eager(Plugin):
        """Takes its mesh before it is applied."""

        api = (1, 0)

        @hookimpl
        def parallelize(self, job: Job) -> Transform | None:
            return job.dist.mesh("dense", "tp") if job.dist.layout.tp > 1 else None  # type: ignore[return-value]

    report = assert_conforms(Eager, folder=tmp_path)
    said = detail(report, "agrees with one process (tp = 2)")
    assert said.startswith("`parallelize` does not say what it covers: PluginError: Plugin 'eager' (")
    assert "hook parallelize (" in said
    assert "There is no mesh 'dense'" in said


def test_a_transform_that_covers_no_axis_is_verified_beside_data_parallelism(tmp_path: Path, ranks: Pool) -> None:
    report = check("ac", folder=tmp_path, ranks=ranks)
    assert [one.name for one in report.checks if one.name.startswith("agrees")] == [SHARDED]
    assert report.passed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_plugin_for_devices_that_are_not_here_is_skipped_and_refused(tmp_path: Path, run_forge: RunForge) -> None:
    report = assert_conforms(two_ranks.OnlyCUDA, folder=tmp_path)
    assert [(one.name, one.detail) for one in report.of("skip")] == [
        ("has what it needs", "it runs on cuda only, and there is none here")
    ]
    with pytest.raises(ConfigError, match=r"^Plugin 'only_cuda' runs on cuda only; this run's device is cpu\.$"):
        run_forge([two_ranks.OnlyCUDA])


def test_an_example_names_the_plugins_to_be_tried_with(tmp_path: Path, ranks: Pool) -> None:
    class Leaning(Plugin):
        """Needs another transform to be there."""

        api = (1, 0)
        facts = {"check.example": ("plugins=ac", "ac.every=2")}

        @hookimpl
        def parallelize(self, job: Job) -> Transform:
            from forge_train import Applied

            return Transform(Phase.COMPILE, "leaning", lambda part: Applied(part, tuple(part.units)), requires=("ac",))

    assert_conforms(Leaning, folder=tmp_path, ranks=ranks)

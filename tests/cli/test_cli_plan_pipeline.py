"""`forge plan` of a pipeline: its timeline, its stages, and other schedules."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_command import Forge
from forge_train_tools.planning import fewer

pytestmark = pytest.mark.slow

ONE = ("-s", "train.micro_batch=1")
FOUR = ("plan", "--world", "4", "-p", "pp", "-s", "parallel.pp=4", *ONE, "-s", "decoder.layers=8")
TWO = ("plan", "--world", "2", "-p", "pp", "-s", "parallel.pp=2", *ONE)
PATTERNS = 'adamw.groups=[{match="layers.7.*", lr=0.5}, {match="embedding.*", lr=0.3}]'


def test_is_drawn_and_compared(forge: Forge, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fewer, "AFFORDABLE", 0)  # a timeline is the schedule's, whatever is rehearsed
    printed = forge(*FOUR, "--schedules", "--svg", "timeline.svg").out
    assert "4 stages, 4 parts, 8 micro-batches: ranks wait" in printed
    (first,) = [line for line in printed.splitlines() if line.startswith("  rank 0 ")]
    assert first.split()[2].startswith("F")
    assert first.count("F") == first.count("B") == 8
    assert all(f"\n  stage {stage}  {stage} " in printed for stage in range(4))
    assert "this run" in next(line for line in printed.splitlines() if line.startswith("  1f1b "))
    picture = (folder / "timeline.svg").read_text()
    assert forge(*TWO, "-s", "decoder.layers=2", "--svg", "timeline.svg").code == 0, "a picture is drawn anew"
    assert "<title>3B7</title>" not in (folder / "timeline.svg").read_text()
    assert picture.startswith("<svg ")
    assert "<title>3B7</title>" in picture


def test_in_a_script(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage in every figure: totals, groups of parameters whose patterns match on one stage only, FLOPs."""
    monkeypatch.setattr(fewer, "AFFORDABLE", 0)
    made = forge(*FOUR, "-s", "pp.schedule=zbv", "-s", PATTERNS, "--schedules", "--json").json
    whole = forge("plan", "-s", "decoder.layers=8", "-s", PATTERNS, "--json").json
    assert made["parameters"]["total"] == whole["parameters"]["total"]
    assert made["flops_per_token"] == pytest.approx(whole["flops_per_token"])
    groups = [{one["match"]: one["elements"] for one in plan["optimizer"]} for plan in (made, whole)]
    assert groups[0] == groups[1]
    stages = made["pipeline"]["stages"]
    assert [stage["parts"] for stage in stages] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert sum(stage["flops_share"] for stage in stages) == pytest.approx(1)
    assert made["memory"]["peak"] == max(stage["memory"]["peak"] for stage in stages)
    by_name = {one["name"]: one for one in made["pipeline"]["alternatives"]}
    assert [name for name, one in by_name.items() if one["current"]] == ["zbv"]
    assert by_name["zbv"]["duration"] == made["pipeline"]["duration"] > 1
    assert by_name["gpipe"]["bubble"] == pytest.approx(3 / 11)
    assert by_name["gpipe"]["kept"] > 1.9 * by_name["1f1b"]["kept"]


def test_a_schedule_with_too_few_micro_batches_says_what_would_do(
    forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number it needs, and the setting that brings it; where larger batches alone do, how large."""
    monkeypatch.setattr(fewer, "AFFORDABLE", 0)  # a whole rehearsal says no more of it

    def problems(*sets: str) -> dict[str, str]:
        more = [word for one in (*sets, "decoder.layers=4") for word in ("-s", one)]
        made = forge(*TWO, *more, "--schedules", "--json").json["pipeline"]["alternatives"]
        return {one["name"]: one["problem"] for one in made}

    batch = ("train.global_batch=8", "train.micro_batch=4", "pp.schedule=gpipe")
    said = "pp.schedule: dualpipe_v needs 4 micro-batches in a step or more, and there are 2"
    assert problems(*batch)["dualpipe_v"] == f"{said}: set train.micro_batch to 2, or take larger batches."
    larger = "take larger batches, of 4 sequences or more on each data-parallel rank"
    assert problems("train.global_batch=2")["dualpipe_v"] == f"{said}: {larger}."
    rounds = problems("train.global_batch=9")
    assert rounds["interleaved_1f1b"].endswith("9 do not divide into 4; 8 and 12 do.")
    assert rounds["dualpipe_v"] == ""


@pytest.mark.slow
@pytest.mark.extended  # test_planning_alike.py has that in CI
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_few_micro_batches_tell_what_all_would(forge: Forge, monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """Where a whole rehearsal would take long; a stage like another one is not rehearsed at all."""
    arguments = (*FOUR, "-s", f"pp.schedule={schedule}", "--json")
    monkeypatch.setattr(fewer, "AFFORDABLE", 10**6)
    whole = forge(*arguments).json
    monkeypatch.setattr(fewer, "AFFORDABLE", 0)
    few = forge(*arguments).json
    assert few["communication"] == whole["communication"]
    assert few["kernel_flops"] == pytest.approx(whole["kernel_flops"])
    for one, other in zip(few["pipeline"]["stages"], whole["pipeline"]["stages"], strict=True):
        assert one["communication"] == other["communication"]
        assert one["memory"]["peak"] == pytest.approx(other["memory"]["peak"], rel=0.1)


def test_a_part_of_the_embedding_alone_has_no_units(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the head alone; other ranks recompute and compile their blocks."""
    monkeypatch.setattr(fewer, "AFFORDABLE", -1)  # parts without units, too
    cuts = ("-s", "decoder.layers=2", "-s", 'pp.cuts=["layers.0", "layers.1", "head"]')
    made = forge(*FOUR[:-2], *cuts, "-p", "ac,compile", "--json").json
    matched = {one["slot"]: one["matched"] for one in made["phases"]}
    assert matched["ac"] == matched["compile"] == ["layers.0", "layers.1"]


def test_a_picture_overwrites_nothing_else(forge: Forge, folder: Path) -> None:
    mine = folder / "mine.toml"
    mine.write_text("[train]\nmicro_batch = 1\n")
    for arguments in (("plan", "mine.toml", *FOUR[1:]), ("config", "show", "mine.toml", "--plot")):
        refused = forge(*arguments, "--svg", "mine.toml", fails=2)
        assert "mine.toml exists and is not an SVG; choose another name, or remove it." in refused.err
        assert mine.read_text() == "[train]\nmicro_batch = 1\n"


def test_rows_add_up_in_the_order_of_the_model(forge: Forge, folder: Path) -> None:
    """Also where a schedule has the first part on the last rank."""
    table = "1F0,1F1,1B0,1B1\n0F0,0F1,0B0,0B1\n"
    (folder / "swapped.csv").write_text(table)
    settings = "parallel.pp=2 train.global_batch=2 train.micro_batch=1 decoder.layers=3 pp.schedule=csv"
    sets = [word for setting in f"{settings} pp.table=swapped.csv".split() for word in ("-s", setting)]
    counts = forge("plan", "--world", "2", "-p", "pp", *sets, "--json").json["parameters"]
    assert sum(group["held"] for group in counts["groups"]) == counts["held"] < counts["total"]
    assert [group["module"] for group in counts["groups"]] == ["embedding", "layers", "norm", "head"]


def test_what_needs_a_pipeline_says_so(forge: Forge) -> None:
    refused = forge("plan", "--schedules", fails=2)
    assert "--schedules needs a pipeline whose executor declares what its ranks do; parallel.pp is 1." in refused.err

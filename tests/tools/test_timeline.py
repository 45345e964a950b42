"""The simulation of a pipeline's step: bubbles as published, what is kept, what the step's time consists of."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

import schedules
from forge_train import ConfigError
from forge_train_kit.pipeline import Timetable, Work
from forge_train_tools.planning.drawing import IDLE, is_cut, rows, svg
from forge_train_tools.planning.passes import Footprint, Pass, footprint
from forge_train_tools.planning.timeline import PartCost, Timeline, simulate

pytestmark = [pytest.mark.unit]

EVEN = PartCost(1.0, 1.0, 1.0, keeps=1.0)
SIZES = [(2, 4), (4, 8), (4, 16), (8, 16)]


def simulated(name: str, ranks: int, micro_batches: int, cost: PartCost = EVEN) -> Timeline:
    table = schedules.timetable(name, ranks, micro_batches)
    return simulate(table, [cost] * table.parts)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B"])
def test_bubble_is_the_published_one(name: str, p: int, m: int) -> None:
    """(p − 1) / (m + p − 1) of the step, and of v parts on a rank a v-th of that idle time (arXiv:2104.04473, §2.2)."""
    v = schedules.parts_of_a_rank(name)
    made = simulated(name, p, m, PartCost(1.0, 1.3, 0.6))
    assert made.bubble == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("cost", [EVEN, PartCost(1.0, 1.3, 0.6), PartCost(2.0, 3.0, 1.0)])
def test_interleaved_zero_bubble_waits_as_zb_h1(p: int, m: int, parts: int, cost: PartCost) -> None:
    """(p − 1)(T_F + T_B − T_W), with times of a part (arXiv:2401.10241, table 2: ZB-H1, which torch interleaves)."""
    table = schedules.timetable("InterleavedZeroBubble", p, m, parts)
    made = simulate(table, [cost] * table.parts)
    expected = (p - 1) * (cost.forward + cost.input_gradient - cost.weight_gradient)
    assert made.waiting == pytest.approx(expected)
    assert made.duration == pytest.approx(made.busy(0) + expected)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_no_rank_waits_under_zbv(p: int, m: int) -> None:
    """arXiv:2401.10241, §6: none where the three passes take the same time, each rank from its own first action on."""
    made = simulated("ZBVZeroBubble", p, m)
    assert made.waiting == pytest.approx(0)
    assert made.duration == pytest.approx(6 * m + p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("cost", [EVEN, PartCost(1.2, 1.2, 0.8)])
def test_dualpipe_waits_as_published(p: int, m: int, cost: PartCost) -> None:
    """(PP / 2 − 1)(F&B + B − 3W), where p is PP / 2 (github.com/deepseek-ai/DualPipe, after arXiv:2412.19437); F&B, the
    time of a pair, is here that of its two."""
    made = simulated("DualPipeV", p, max(m, 2 * p), cost)
    backward = cost.of(Work.BACKWARD)
    assert made.waiting == pytest.approx((p - 1) * (cost.forward + backward + backward - 3 * cost.weight_gradient))


def test_overlapped_pairs_take_less() -> None:
    table = schedules.timetable("DualPipeV", 4, 10)
    whole, overlapped = (simulate(table, [EVEN] * 8, overlapped=share).duration for share in (1.0, 0.7))
    assert 0.7 * whole < overlapped < 0.9 * whole


@pytest.mark.parametrize(("name", "first"), [("GPipe", 8), ("1F1B", 4), ("LoopedBFS", 16), ("ZBVZeroBubble", 8)])
def test_activations_in_flight(name: str, first: int) -> None:
    made = simulated(name, 4, 8)
    assert made.activations(0) == first
    if name == "1F1B":
        assert [made.in_flight(rank) for rank in range(4)] == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]


def test_an_uneven_cut_shows() -> None:
    table = schedules.timetable("1F1B", 4, 8)
    costs = [EVEN, EVEN, PartCost(2.0, 2.0, 2.0), EVEN]
    made = simulate(table, costs)
    assert made.bubble > simulate(table, [EVEN] * 4).bubble
    assert made.stretch < made.duration / made.busy(0)
    assert sum(span.rank == 2 for span in made.critical_path) >= 2 * 8 - 1


def test_the_critical_path_is_the_step() -> None:
    table = Timetable.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    made = simulate(table, [PartCost(1, 1, 1, sends=10), PartCost(1, 1, 1, sends=99)], bytes_per_second=20)
    assert [str(span.slot) for span in made.critical_path] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]
    assert made.duration == 1 + 0.5 + 1 + 2 + 1 + 2 + 0.5 + 2
    assert made.ranks[0][2].start == 1 + 0.5 + 1 + 2 + 0.5
    assert made.sent == (20, 20)


def test_each_part_has_its_cost() -> None:
    with pytest.raises(ConfigError, match="2 parts, and there are costs of 1"):
        simulate(Timetable.from_csv("0F0,0B0\n1F0,1B0"), [EVEN])


def test_memory_is_laid_out_along_another_order() -> None:
    """Read from passes that come one after the other, told of those of the step."""
    changes = [7, 0, 5, 2, -2, 6, -1, 5, 9, -9, -5, -5, 4, -4, -5]
    passes = [Pass(2, 0, Work.FORWARD), Pass(5, 0, Work.FORWARD), Pass(7, 0, Work.FORWARD)]
    passes += [Pass(8, 0, Work.BACKWARD), Pass(11, 0, Work.BACKWARD), Pass(12, 0, Work.BACKWARD)]
    found = footprint(changes, passes, [3])
    assert found == Footprint(
        {(3, Work.FORWARD): 7, (3, Work.BACKWARD): 9},
        {(3, Work.FORWARD): (5, 5, 5), (3, Work.BACKWARD): (-5, -5, -5)},
    )
    alone = found.renumbered({3: 0})
    assert alone.keeps(0) == 5
    assert alone.peak(schedules.timetable("GPipe", 1, 8), 0) == 8 * 5 + 9
    assert alone.peak(schedules.timetable("GPipe", 1, 2), 0) == 2 * 5 + 9
    assert alone.peak(Timetable.from_csv("0F0,0B0,0F1,0B1,0F2,0B2"), 0) == 5 + 9


# -- drawing ----------------------------------------------------------------------------------------------------------


def test_rows_show_each_action_where_it_is() -> None:
    made = simulated("1F1B", 2, 2)
    lines = ["".join(cell.text for cell in row) for row in rows(made, 36)]
    assert lines == ["F0──F1──········B0──────····B1──────"[:36], "····F0──B0──────F1──B1──────········"]
    plain = ["".join(cell.text for cell in row) for row in rows(made, 18, ascii_only=True)]
    assert plain == ["F0F1....B0--..B1--", "..F0B0--F1B1--...."]


@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize("width", [20, 77, 400])
def test_rows_fit_and_idle_is_idle(name: str, width: int) -> None:
    made = simulated(name, 4, 8)
    drawn = [list(row) for row in rows(made, width)]
    widths = {sum(len(cell.text) for cell in row) for row in drawn}
    assert len(widths) == 1
    assert max(widths) <= width
    if width == 400:
        idle = sum(len(cell.text) for row in drawn for cell in row if cell.kind == IDLE)
        assert idle / (4 * max(widths)) == pytest.approx(made.bubble, abs=0.02)


def test_a_long_step_is_shown_by_its_beginning_and_its_end() -> None:
    made = simulated("1F1B", 4, 240)
    first, *_ = ["".join(cell.text for cell in row) for row in rows(made, 88)]
    assert len(first) == 2 * 42 + 3
    assert first.startswith("F0")
    assert "⋯⋯⋯" in first
    assert "B239" in first
    assert is_cut(made, 88)
    assert not is_cut(simulated("1F1B", 2, 8), 18)


@pytest.mark.parametrize("name", schedules.NAMES)
def test_the_picture_has_a_box_for_each_action(name: str) -> None:
    made = simulated(name, 4, 8)
    tree = ET.fromstring(svg(made, "a <title>"))
    space = "{http://www.w3.org/2000/svg}"
    titles = [one.text for one in tree.iter(f"{space}title")]
    assert sorted(titles[1:]) == sorted(str(span.slot) for row in made.ranks for span in row)  # type: ignore[type-var]
    boxes = [one for one in tree.iter(f"{space}rect") if one.find(f"{space}title") is not None]
    assert max(float(one.get("x", 0)) + float(one.get("width", 0)) for one in boxes) <= 960


@pytest.mark.parametrize("name", schedules.NAMES)
def test_a_long_step_goes_on_in_lines_that_have_room_for_its_numbers(name: str) -> None:
    made = simulated(name, 4, 128)
    tree = ET.fromstring(svg(made, "long"))
    space = "{http://www.w3.org/2000/svg}"
    boxes = [one for one in tree.iter(f"{space}rect") if one.find(f"{space}title") is not None]
    numbers = [one for one in tree.iter(f"{space}text") if one.get("class") == "on"]
    assert len(numbers) >= 0.94 * sum(len(row) for row in made.ranks), (
        "but for some short ones, and those at a line's end"
    )
    lanes: dict[str, list[tuple[float, float]]] = {}
    for box in boxes:
        x, width = float(box.get("x", 0)), float(box.get("width", 0))
        lanes.setdefault(box.get("y", ""), []).append((x, x + width))
    for lane in lanes.values():
        assert max(end for _, end in lane) <= 960
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(lane)))
    assert len(lanes) % 4 == 0
    assert len(lanes) >= 3 * 4
    titles = {(box.find(f"{space}title")).text for box in boxes}  # type: ignore[union-attr]
    assert titles == {str(span.slot) for row in made.ranks for span in row}
    height = float(tree.get("viewBox", "").split()[3])
    assert max(map(float, lanes)) < height


def test_a_part_that_takes_hardly_any_time_makes_no_picture_longer() -> None:
    table = schedules.timetable("1F1B", 4, 8)
    costs = [PartCost(1e-6, 1e-6, 1e-6), *[EVEN] * 3]
    assert svg(simulate(table, costs), "uneven").count(">rank 0<") == 1

"""What every rank of a pipeline does: placement, order, torch's format, and what can't be."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

import schedules
from forge_train import ConfigError
from forge_train_kit.pipeline import Action, Overlap, Timetable, Work

TWO = "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize("name", schedules.NAMES)
def test_torchs_schedules_are_read_and_written(name: str) -> None:
    table = schedules.timetable(name, 4, 8)
    parts = 4 * schedules.parts_of_a_rank(name)
    assert (len(table.ranks), table.parts, table.micro_batches) == (4, parts, 8)
    v = name in schedules.V
    assert table.placement == tuple(7 - part if v and part > 3 else part % 4 for part in range(parts))
    assert Timetable.from_csv(table.to_csv()) == table
    cells = [cell for line in table.to_csv().splitlines() for cell in line.split(",")]
    assert all(str(torch_schedules._Action.from_str(cell) or "") == cell for cell in cells)


def test_tells_who_has_what_and_what_it_waits_for() -> None:
    table = Timetable.from_csv(TWO)
    assert (table.parts_of(1), table.micro_batches, table.ranks[0][2]) == ([1], 2, None)
    assert table.actions(1)[0] == Action(Work.FORWARD, 1, 0)
    assert list(map(str, table.needs(Action(Work.FORWARD, 1, 0)))) == ["0F0"]
    assert list(map(str, table.needs(Action(Work.BACKWARD, 0, 1)))) == ["0F1", "1B1"]
    split = Timetable.from_csv("0F0,0B0\n1F0,1I0,1W0")
    assert list(map(str, split.needs(Action(Work.BACKWARD, 0, 0)))) == ["0F0", "1I0"]
    assert list(map(str, split.needs(Action(Work.WEIGHT_GRADIENT, 1, 0)))) == ["1I0"]


def test_keeps_overlapped_pairs() -> None:
    table = schedules.timetable("DualPipeV", 4, 10)
    pairs = [slot for slot in table.ranks[0] if isinstance(slot, Overlap)]
    assert pairs
    assert str(pairs[0]) == "(0F7;7B3)OVERLAP_F_B"
    assert table.actions(0)[-1].work is Work.WEIGHT_GRADIENT


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at least one action"),
        ("0F0,0X0", "line 1, cell 2: '0X0' is not an action"),
        ("0F0,0SEND_F0", "What is sent and gathered follows"),
        ("0F0,0B0\n0F1,0B1", "Part 0 is on rank 0 and on rank 1"),
        ("0F0,2F0", "has part 2, but nothing for part 1"),
        ("0F0,0B0\n300000F0,300000B0", "has part 300000, but nothing for part 1."),
        ("0B0,0F0\n1F0,1B0", "waits at 0B0 for 0F0 of rank 0, 1B0 of rank 1, which can't come before it"),
        ("0F0,0B0\n,", "Nothing is to be done on rank 1"),
        ("0F0,0B0,0F1", "Micro-batch 1 in part 0 (rank 0) has F; it needs F, and B or both I and W"),
        ("0F0,0I0", "has F, I; it needs"),
        ("0F0,0B0,0W0", "has F, B, W; it needs"),
        ("0F0,0F0,0B0", "0F0 is twice on rank 0"),
        ("0B0,0F0", "rank 0 waits at 0B0 for 0F0 of rank 0"),
        ("0F0,0W0,0I0", "rank 0 waits at 0W0 for 0I0 of rank 0"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", "rank 0 waits at 0B0 for 1B0 of rank 1, which can't come before it"),
        ("(0B0;0F0)OVERLAP_F_B", "a pair is a forward pass and a backward pass"),
        ("(0F0;0B0)OVERLAP_F_B", "waits at (0F0;0B0)OVERLAP_F_B for 0F0"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_told_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Timetable.from_csv(text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_torchs_own_faulty_table_is_refused() -> None:
    """torch 2.13's `Schedule1F1B._get_pipeline_order` counts the last rank's forward passes from 1."""
    rows = torch_schedules.Schedule1F1B(schedules._stage(0, 2, 2), 2)._get_pipeline_order()
    assert rows
    text = "\n".join(
        ",".join(str(one or "") for one in rows[rank] if one is None or one.is_compute_op) for rank in (0, 1)
    )
    with pytest.raises(ConfigError, match=r"Micro-batch 2 in part 0 \(rank 0\) has nothing"):
        Timetable.from_csv(text)

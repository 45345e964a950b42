"""Where a pipeline is cut, what its schedules need, and in which order its ranks send: without processes."""

from __future__ import annotations

import itertools
import sys
import types
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from forge_train import ConfigError
from forge_train.mesh.layout import Layout
from forge_train_kit.pipeline import Action, Timetable, Work, cuts
from forge_train_kit.pipeline.parts import part_of
from forge_train_plugins.parallel._pp import cutting, program, rules, schedules
from forge_train_plugins.parallel.pp import PipelineParallel

pytestmark = [pytest.mark.unit]
Config = PipelineParallel.Config


# -- cuts -------------------------------------------------------------------------------------------------------------


def largest(values: list[float], found: tuple[int, ...]) -> float:
    return max(sum(values[a:b]) for a, b in pairwise(found))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=9), st.data())
def test_no_cut_is_better(entries: list[tuple[int, int]], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(entries)))
    flops, size = ([float(one[at]) for one in entries] for at in (0, 1))
    found = cuts.balanced([cuts.Cost(*one) for one in zip(flops, size, strict=True)], parts)
    assert (found[0], found[-1], len(found)) == (0, len(entries), parts + 1)
    assert all(a < b for a, b in pairwise(found)), "no part is empty"
    every = [(0, *inner, len(entries)) for inner in itertools.combinations(range(1, len(entries)), parts - 1)]
    best = min(largest(flops, one) for one in every)
    assert largest(flops, found) <= best * cuts.SLACK
    near = [one for one in every if not any(flops) or largest(flops, one) <= best * cuts.SLACK]
    assert largest(size, found) == min(largest(size, one) for one in near)


def test_more_parts_than_stages_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"the model has 3 stages, which can't be cut into 4 parts"):
        cuts.balanced([cuts.Cost(1, 1)] * 3, 4)


STAGES = (("embedding",), ("layers.0",), ("layers.1",), ("norm", "head"))


def test_cuts_by_name() -> None:
    assert cuts.given(("layers.1", "head"), STAGES) == (0, 2, 3, 4)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("layer.1",), r"no stage of the model has a module 'layer.1'. Did you mean 'layers.1'"),
        (("embedding",), r"'embedding' begins the model, so a part would be empty"),
        (("layers.1", "layers.0"), r"'layers.0' comes no later than 'layers.1', so a part would be empty"),
    ],
)
def test_cuts_that_do_not_fit(names: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cuts.given(names, STAGES)


class Small(nn.Module):
    """A tower with its blocks in a list, and something beside all stages that has no weights."""

    stages = (("embedding",), ("blocks.0.inner",), ("blocks.1.inner",), ("head",))

    def __init__(self, loose: bool = False) -> None:
        super().__init__()
        self.embedding: Any = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.ModuleDict({"inner": nn.Linear(4, 4)}) for _ in range(2))
        self.shared = nn.Dropout(0.0)
        self.head: Any = nn.Linear(4, 5, bias=False)
        if loose:
            self.gain = nn.Parameter(torch.ones(4))

    def hidden_shape(self, batch: int, sequence: int) -> tuple[int, ...]:
        return batch, sequence, 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block["inner"](x) if "inner" in block else x
        return self.shared(x) if self.head is None else self.head(x)


def test_parts_are_the_model_with_holes() -> None:
    model = Small()
    runs = [range(2), range(2, 4)]
    first, second = (part_of(model, model.stages, run) for run in runs)
    ids = torch.arange(5)[None]
    torch.testing.assert_close(second(first(ids)), model(ids))
    names = [[name for name, _ in part.named_parameters()] for part in (first, second)]
    assert names == [
        ["embedding.weight", "blocks.0.inner.weight", "blocks.0.inner.bias"],
        ["blocks.1.inner.weight", "blocks.1.inner.bias", "head.weight"],
    ]
    assert len(list(model.parameters())) == 6, "the model itself is as it was"


def test_what_can_not_be_cut_says_why() -> None:
    with pytest.raises(ConfigError, match=r"no stage of Small has gain; each parameter must belong to one"):
        cutting._stages(Small(loose=True))
    with pytest.raises(ConfigError, match=r"the model \(Linear\) declares no stages"):
        cutting._stages(nn.Linear(2, 2))


def test_a_tied_weight_in_another_part_becomes_a_copy() -> None:
    model = Small()
    model.head.weight = nn.Parameter(torch.empty(5, 4, device="meta"))
    model.embedding.weight = model.head.weight
    (tie,), copies = cutting._untie(model, model.stages, [range(2), range(2, 4)])
    assert copies == ["head.weight"]
    assert (tie.copy, tie.copy_part, tie.owner, tie.owner_part) == ("head.weight", 1, "embedding.weight", 0)
    assert model.head.weight is not model.embedding.weight
    model.head.weight = model.embedding.weight
    assert cutting._untie(model, model.stages, [range(4)]) == ([], [])


# -- schedules --------------------------------------------------------------------------------------------------------


def made(name: str, ranks: int, micro_batches: int, parts: int = 0) -> Timetable:
    return schedules.timetable(Config(schedule=name, parts=parts), ranks, micro_batches)


@pytest.mark.parametrize("name", rules.RULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_a_rule_allows_can_be_made_and_nothing_else(name: str, ranks: int) -> None:
    rule = rules.RULES[name]
    for micro_batches in range(1, 4 * ranks + 1):
        for parts in {rule.parts[0], rule.parts[1] or 3}:
            if rule.problem(ranks, parts, micro_batches):
                with pytest.raises(ConfigError, match=f"pp.schedule: {name} "):
                    made(name, ranks, micro_batches, parts)
                continue
            table = made(name, ranks, micro_batches, parts)
            assert (len(table.ranks), table.parts, table.micro_batches) == (ranks, ranks * parts, micro_batches)
            splits = any(one.work is Work.WEIGHT_GRADIENT for rank in range(ranks) for one in table.actions(rank))
            assert not splits or rule.split


def test_another_number_of_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"zbv has 2 parts on each rank, and pp.parts is 3"):
        made("zbv", 2, 4, 3)


def test_there_is_no_such_schedule() -> None:
    with pytest.raises(ConfigError, match=r"there is no '1fb1'. Did you mean '1f1b'\? There are 1f1b, csv, dualpipe_v"):
        made("1fb1", 2, 4)


def backwards(ranks: int, parts: int, micro_batches: int) -> Timetable:
    """A third party's: 1F1B on one part a rank, ranks in reverse."""
    rows = made("1f1b", ranks, micro_batches).ranks
    return Timetable(tuple(reversed(rows)))


def test_a_function_of_anybody_is_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("their_schedules")
    module.backwards = backwards  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_schedules", module)
    assert made("their_schedules:backwards", 3, 4).placement == (2, 1, 0)
    points = [SimpleNamespace(name="reversed", value="their_schedules:backwards")]
    monkeypatch.setattr(rules.importlib.metadata, "entry_points", lambda group: points)
    assert made("reversed", 3, 4).placement == (2, 1, 0)
    with pytest.raises(ConfigError, match=r"their_schedules:nothing can't be loaded: AttributeError"):
        made("their_schedules:nothing", 3, 4)
    with pytest.raises(ConfigError, match=r"pp.schedule: os:getcwd failed: TypeError"):
        made("os:getcwd", 3, 4)
    with pytest.raises(ConfigError, match=r"pp.schedule: builtins:slice gave a slice; a schedule gives a Timetable"):
        made("builtins:slice", 3, 4)


def test_a_file_of_actions(tmp_path: Any) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(made("zbv", 2, 3).to_csv(), encoding="utf-8")
    config = Config(schedule="csv", table=str(file))
    assert schedules.timetable(config, 2, 3) == made("zbv", 2, 3)
    file.with_name("broken.csv").write_text("0B0,0F0", encoding="utf-8")
    broken = Config(schedule="csv", table=str(file.with_name("broken.csv")))
    with pytest.raises(ConfigError, match=r"pp.table: \S*broken.csv: The timetable never ends"):
        schedules.timetable(broken, 1, 1)
    with pytest.raises(ConfigError, match=r"pp.table: \S*none.csv can't be read: FileNotFoundError"):
        schedules.timetable(Config(schedule="csv", table=str(tmp_path / "none.csv")), 1, 1)
    with pytest.raises(
        ConfigError, match=r"pp.table: \S*mine.csv has 2 ranks and 3 micro-batches; the run has parallel.pp = 2 and 4"
    ):
        schedules.timetable(config, 2, 4)


def test_parts_and_cuts_are_checked_against_a_schedule_of_anybody(tmp_path: Any) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(made("zbv", 2, 3).to_csv(), encoding="utf-8")
    options = {"schedule": "csv", "table": str(file)}
    assert problems({**options, "cuts": ("a", "b", "c")}, batch=3) == []
    assert schedules.timetable(Config(**options, parts=2), 2, 3).parts == 4
    with pytest.raises(ConfigError, match=r"pp.parts: 7 on each rank are asked for, and \S*mine.csv has 4 parts on 2"):
        schedules.timetable(Config(**options, parts=7), 2, 3)
    with pytest.raises(
        ConfigError, match=r"pp.parts: 5 on each rank are asked for, and \S*:backwards has 3 parts on 3"
    ):
        made(f"{__name__}:backwards", 3, 4, 5)


def said(config: PipelineParallel.Config, micro_batch: int) -> str:
    """Of a step of eight sequences on two ranks of a pipeline."""
    train = SimpleNamespace(global_batch=8, micro_batch=micro_batch)
    job: Any = SimpleNamespace(config=SimpleNamespace(train=train), dist=SimpleNamespace(layout=Layout(pp=2)))
    with pytest.raises(ConfigError) as error:
        cutting._timetable(config, job, 8)
    return str(error.value)


def test_sizes_are_told_where_their_number_is_the_matter(tmp_path: Any) -> None:
    few = said(Config(), 8)
    assert few == (
        "pp.schedule: 1f1b needs 2 micro-batches in a step or more, and there is 1. They are 8 sequences "
        "(train.global_batch) in micro-batches of 8 on 1 data-parallel ranks: set train.micro_batch to 4, or take "
        "larger batches."
    )
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0B0\n1F0,1B0", encoding="utf-8")
    assert said(Config(schedule="csv", table=str(file)), 2).endswith("in micro-batches of 2 on 1 data-parallel ranks.")
    file.write_text("0F0", encoding="utf-8")
    assert said(Config(schedule="csv", table=str(file)), 1).endswith("needs F, and B or both I and W.")
    assert said(Config(schedule="os:getcwd"), 1).endswith("(3 given).")
    assert said(Config(schedule="zbv", parts=3), 1).endswith("pp.parts is 3.")


# -- programmes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", rules.RULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_receipt_meets_its_send_in_order_and_nobody_waits_for_ever(name: str, ranks: int) -> None:
    """With one channel in each direction between two ranks, sends and receipts that block."""
    table = made(name, ranks, 2 * ranks)
    rows = [program.program(table, rank) for rank in range(ranks)]
    sent: dict[tuple[int, int], list[Action]] = {}
    taken: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(rows):
        for one in row:
            if isinstance(one, program.Send):
                sent.setdefault((rank, one.peer), []).append(one.action)
            elif isinstance(one, program.Receive):
                taken.setdefault((one.peer, rank), []).append(one.action)
    assert sent == taken
    at = [0] * ranks
    while any(at[rank] < len(row) for rank, row in enumerate(rows)):
        before = list(at)
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and isinstance(row[at[rank]], Action):
                at[rank] += 1
        for rank, row in enumerate(rows):
            if at[rank] < len(row) and isinstance(one := row[at[rank]], program.Send):
                peer = rows[one.peer]
                if at[one.peer] < len(peer) and peer[at[one.peer]] == program.Receive(one.action, rank):
                    at[rank] += 1
                    at[one.peer] += 1
        assert at != before, "deadlock"


def test_the_last_of_a_part_brings_gradients_of_weights() -> None:
    table = made("zbv", 2, 4)
    last = program.last_of_each(table, 0)
    assert {(one.part, one.work is Work.FORWARD) for one in last} == {(0, True), (0, False), (3, True), (3, False)}
    row = table.actions(0)
    for one in last:
        later = row[row.index(one) + 1 :]
        assert not [other for other in later if other.part == one.part and (other.work is Work.FORWARD) == (
            one.work is Work.FORWARD) and other.work is not Work.INPUT_GRADIENT]  # fmt: skip


# -- configuration ----------------------------------------------------------------------------------------------------


def problems(options: dict[str, Any], batch: int = 8, micro_batch: int = 1, **parallel: int) -> list[str]:
    train = SimpleNamespace(batches=(batch,), micro_batch=micro_batch)
    axes = SimpleNamespace(**{"pp": 2, "dp_replicate": 1, "dp_shard": 1, **parallel})
    run: Any = SimpleNamespace(parallel=axes, train=train)
    return [f"{one.key}: {one.message}" for one in rules.check(Config(**options), run)]


@pytest.mark.parametrize(
    ("options", "more", "says"),
    [
        ({"schedule": "csv"}, {}, 'pp.table: is read by schedule = "csv", and only by that; set both or neither.'),
        ({"cuts": ("a", "b")}, {}, "pp.cuts: they make 3 parts, and there are 2: 1 on each of 2 ranks."),
        (
            {}, {"pp": 16},
            ("pp.schedule: 1f1b needs 16 micro-batches in a step or more, and there are 8 (a global batch of 8 is "
            "8 × train.micro_batch = 1 × 1 data-parallel ranks): take larger batches, of 16 sequences or more on "),
        ),
        (
            {}, {"micro_batch": 0, "dp_shard": 2},
            ("pp.schedule: 1f1b needs 2 micro-batches in a step or more, and there is 1 (a global batch of 8 is 1 × "
            "train.micro_batch = 4 × 2 data-parallel ranks): set train.micro_batch to 2, or take larger batches."),
        ),
        (
            {"schedule": "interleaved_1f1b"}, {"batch": 11, "pp": 4},
            "pp.schedule: interleaved_1f1b takes micro-batches in rounds of about 4, of equal size: 11 do not divide",
        ),
        ({"schedule": "zbw"}, {}, "pp.schedule: there is no 'zbw'. Did you mean 'zbv'?"),
        ({"schedule": "csv", "table": "none.csv"}, {}, "pp.table: no such file: none.csv."),
        ({"schedule": "gpipe", "parts": 2}, {}, "pp.schedule: gpipe has 1 part on each rank, and pp.parts is 2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_before_anything_slow(
    options: dict[str, Any], more: dict[str, int], says: str
) -> None:
    found = problems(options, **more)
    assert len(found) == 1
    assert found[0].startswith(says)

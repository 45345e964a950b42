"""Rows that are generated side by side on layouts, against one process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import items_data
from crossed import few, marked
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist]

EXPERTS = ("moe.experts=4", "moe.hidden=16", "moe.top_k=2")
MLA = ("mla.kv_rank=16", "mla.q_rank=24", "mla.rope_dim=4", "decoder.kv_heads=4")
DELTA = ("delta_net.heads=4", "delta_net.k_heads=2", "delta_net.k_dim=6", "delta_net.chunk=5")
RINGS = ("parallel.cp=2", "cp.method=ring")
DELTA_CP = ("delta_net.heads=4", "delta_net.k_heads=4", "delta_net.k_dim=6", "delta_net.chunk=5")
DYNAMIC = ("decoder.rope.scaling=dynamic", "decoder.rope.factor=4", "decoder.rope.original_sequence=16")
LAYOUTS: Mapping[str, tuple[int, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "fsdp2": (2, ("fsdp2",), (), ()),
    "tp2": (2, ("tp",), ("parallel.tp=2",), ("decoder.window=6",)),
    "tp2, latents": (2, ("mla", "tp"), ("parallel.tp=2",), MLA),
    "ep2": (2, ("moe", "ep", "fsdp2"), ("parallel.ep=2",), EXPERTS),
    "ep2, rows brought": (2, ("moe", "ep", "alltoall", "fsdp2"), ("parallel.ep=2",), EXPERTS),
    "pp2": (2, ("pp",), ("parallel.pp=2",), ()),
    "pp2, interleaved": (2, ("delta_net", "pp"), ("parallel.pp=2", "pp.schedule=interleaved_1f1b"), DELTA),
    "fsdp2 × tp2": (4, ("fsdp2", "tp"), ("parallel.tp=2",), ()),
    "pp2 × tp2": (4, ("pp", "tp"), ("parallel.pp=2", "parallel.tp=2"), ()),
    "pp2 × tp2, row by row": (4, ("pp", "tp"), ("parallel.pp=2", "parallel.tp=2"), DYNAMIC),
    "fsdp2 × pp2": (4, ("fsdp2", "pp"), ("parallel.pp=2",), ()),
    "fsdp2 on 3": (3, ("fsdp2",), ("train.global_batch=6",), ()),
    "cp2": (2, ("cp", "fsdp2"), ("parallel.cp=2",), ("decoder.window=6",)),
    "cp2 × tp2, latents": (4, ("mla", "cp", "tp"), ("parallel.cp=2", "parallel.tp=2"), MLA),
    "cp2 × pp2, recurrences": (4, ("delta_net", "cp", "pp"), ("parallel.cp=2", "parallel.pp=2"), DELTA_CP),
    "cp2 × ep2, by rings": (2, ("moe", "cp", "ep", "eager", "fsdp2"), ("parallel.ep=2", *RINGS), EXPERTS),
    "fsdp2, row by row": (2, ("fsdp2",), (), DYNAMIC),
}
EXTENDED = (
    *("fsdp2", "pp2", "tp2, latents", "ep2, rows brought", "fsdp2 × pp2"),
    *("cp2 × tp2, latents", "cp2 × pp2, recurrences", "pp2 × tp2, row by row"),
)
"""CI has fsdp2 on three ranks, and a pipeline of more parts."""


@pytest.mark.parametrize("name", marked(LAYOUTS, EXTENDED))
def test_rows_are_those_of_one_process(ranks: Pool, name: str) -> None:
    """With guesses from their texts, too, which are the same everywhere."""
    world, plugins, layout, model = LAYOUTS[name]
    kinds = [one for one in plugins if one in ("moe", "mla", "delta_net")]
    asked: dict[str, Any] = {"slots": 3, "count": 8}
    ((wanted, guessed, counts),) = ranks.run("rows_cases:looked_up", 1, plugins=kinds, values=model, **asked)
    everybody = ranks.run("rows_cases:looked_up", world, plugins=plugins, values=(*model, *layout), **asked)
    assert all(one == everybody[0] for one in everybody), "every rank has every row"
    rows, others, same = everybody[0]
    assert same == counts
    if isinstance(guessed, str):
        assert others == guessed
        assert "can't undo wrong guesses" in guessed
        others = rows
    for (number, ids, logs), (_, some, more), (_, known, other) in zip(
        *map(sorted, (rows, others, wanted)), strict=True
    ):
        assert ids == some == known, number
        assert (torch.tensor([logs, more]) - torch.tensor(other)).abs().max() <= 1e-6


ITEMS: Mapping[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "fsdp2 on 3": (3, ("fsdp2",), ("train.global_batch=6",)),
    "tp2": (2, ("tp",), ("parallel.tp=2",)),
    "pp2": (2, ("pp",), ("parallel.pp=2",)),
    "cp2": (2, ("cp", "fsdp2"), ("parallel.cp=2",)),
}


FUSIONS: Mapping[str, tuple[str, ...]] = {
    "prefix": (),
    "cross_attention": ("cross_attention.every=1", "cross_attention.gate=1.0"),
}


@pytest.mark.parametrize(
    ("name", "fusion"),
    few(
        [*itertools.product(ITEMS, FUSIONS)],
        [("fsdp2 on 3", "cross_attention"), ("tp2", "prefix"), ("pp2", "cross_attention")],
    ),
)
def test_prompts_with_items_are_continued_as_on_one_process(
    ranks: Pool, name: str, fusion: str, tmp_path: Path
) -> None:
    """Some ranks have rows without items, or no row, when another encodes some."""
    items_data.write_scans(tmp_path, (2, 5, 3))
    world, plugins, layout = ITEMS[name]
    asked = {"folder": str(tmp_path), "slots": 1 if fusion == "prefix" else 2}
    (wanted,) = ranks.run("rows_cases:with_items", 1, plugins=(fusion,), values=FUSIONS[fusion], **asked)
    for found in ranks.run(
        "rows_cases:with_items", world, plugins=(fusion, *plugins), values=(*FUSIONS[fusion], *layout), **asked
    ):
        for (number, ids, logs), (_, others, other) in zip(sorted(found), sorted(wanted), strict=True):
            assert ids == others, number
            assert (torch.tensor(logs) - torch.tensor(other)).abs().max() <= 1e-6


DRAFTING: Mapping[str, tuple[int, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "fsdp2 on 3": (3, ("fsdp2",), ("train.global_batch=6",), ()),
    "tp2": (2, ("tp",), ("parallel.tp=2",), ("decoder.window=6",)),
    "tp2, whole sequences": (2, ("tp",), ("parallel.tp=2", "tp.sequence_parallel=false"), ()),
    "tp2, latents": (2, ("mla", "tp"), ("parallel.tp=2",), MLA),
    "ep2": (2, ("moe", "ep", "fsdp2"), ("parallel.ep=2",), EXPERTS),
    "fsdp2 × tp2": (4, ("fsdp2", "tp"), ("parallel.tp=2",), ()),
    "cp2": (2, ("cp", "fsdp2"), ("parallel.cp=2",), ()),
    "pp2": (2, ("pp",), ("parallel.pp=2",), ()),
    "fsdp2 × pp2, interleaved": (4, ("fsdp2", "pp"), ("parallel.pp=2", "pp.schedule=interleaved_1f1b"), ()),
    "pp2 × tp2, tied": (4, ("pp", "tp"), ("parallel.pp=2", "parallel.tp=2"), ("decoder.tied=true",)),
}


@pytest.mark.parametrize("name", marked(DRAFTING, DRAFTING.keys() - {"fsdp2 on 3", "tp2", "pp2"}))
def test_drafts_change_no_row_and_are_those_of_one_process(ranks: Pool, name: str) -> None:
    """Prompts of one token among them, and of other lengths than ranks divide."""
    world, plugins, layout, model = DRAFTING[name]
    kinds, model = [one for one in plugins if one in ("moe", "mla")], (*model, "mtp.depths=2")
    asked: dict[str, Any] = {"slots": 3, "count": 8}
    (wanted,) = ranks.run("rows_cases:rows", 1, plugins=["mtp", *kinds], values=model, **asked)
    ((_, guesses, counts),) = ranks.run(
        "rows_cases:drafted", 1, plugins=["mtp", *kinds], values=model, drafts=2, **asked
    )
    known = {tuple(ids): some for ids, some in guesses}
    everybody = ranks.run(
        "rows_cases:drafted", world, plugins=["mtp", *plugins], values=(*model, *layout), drafts=2, **asked
    )
    for rows, mine, count in everybody:
        for (number, ids, logs), (_, others, other) in zip(sorted(rows), sorted(wanted), strict=True):
            assert ids == others, number
            assert (torch.tensor(logs) - torch.tensor(other)).abs().max() <= 1e-6
        assert {tuple(ids): some for ids, some in mine}.items() <= known.items()
        assert count == counts
    assert {tuple(ids) for _, mine, _ in everybody for ids, _ in mine} == known.keys()


@pytest.mark.parametrize(
    ("plugins", "values", "drafts", "says"),
    [
        (("mtp",), (), 2, "2 drafts were requested; the model's modules can draft at most 1"),
        ((), (), 1, "These weights come without modules that predict further tokens"),
        (("mtp", "delta_net"), DELTA_CP, 1, "This model can't undo wrong drafts"),
    ],
)
def test_a_pipeline_refuses_drafts_on_all_ranks(
    ranks: Pool, plugins: tuple[str, ...], values: tuple[str, ...], drafts: int, says: str
) -> None:
    values = ("parallel.pp=2", *values)
    with pytest.raises(Exception, match=says):
        ranks.run("rows_cases:drafted", 2, plugins=("pp", *plugins), values=values, slots=1, count=1, drafts=drafts)


def test_a_rank_without_a_row_keeps_step(ranks: Pool) -> None:
    (wanted,) = ranks.run("rows_cases:rows", 1, plugins=(), values=(), slots=1, count=2)
    found = ranks.run("rows_cases:rows", 3, plugins=("fsdp2",), values=("train.global_batch=6",), slots=4, count=2)
    assert [[row[:2] for row in sorted(one)] for one in found] == [[row[:2] for row in sorted(wanted)]] * 3


@pytest.mark.parametrize(("plugins", "layout"), [(("fsdp2",), ()), (("pp",), ("parallel.pp=2",))])
def test_what_fails_on_one_rank_fails_on_all(ranks: Pool, plugins: tuple[str, ...], layout: tuple[str, ...]) -> None:
    found = ranks.run("rows_cases:rows", 2, plugins=plugins, values=layout, slots=2, count=4, failing=1)
    assert found == ["request 1 fails"] * 2


@pytest.mark.parametrize(("plugins", "layout"), [(("fsdp2",), ()), (("pp",), ("parallel.pp=2",))])
def test_a_text_comes_in_pieces_on_every_rank(ranks: Pool, plugins: tuple[str, ...], layout: tuple[str, ...]) -> None:
    values = ("decoder.std=0.2",)
    (wanted,) = ranks.run("rows_cases:text", 1, plugins=(), values=values)
    assert ranks.run("rows_cases:text", 2, plugins=plugins, values=(*values, *layout)) == [wanted] * 2
    assert wanted[1] > 8

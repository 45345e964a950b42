"""`statistics` over ranks: equal to one process, however parameters, tokens, heads and experts are spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import statistics_cases
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist]

BASE: dict[str, Any] = {
    "train.global_batch": 12,
    "train.micro_batch": 2,
    "log.every": 3,
    "decoder.heads": 4,
    "statistics.activations": ["layers.*.attention", "layers.*.feed_forward", "layers.*.attention.q"],
    "statistics.attention_logits": True,
}
DENSE: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "dp3": (3, ["fsdp2"], {"parallel.dp_shard": 3}),
    "ddp2": (2, ["ddp"], {"parallel.dp_replicate": 2}),
    "tp2": (2, ["tp"], {"parallel.tp": 2}),
    "tp2dp2": (4, ["fsdp2", "tp"], {"parallel.dp_shard": 2, "parallel.tp": 2}),
}
EXPERTS: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "dp2": (2, ["fsdp2", "moe"], {"parallel.dp_shard": 2}),
    "ep2": (2, ["fsdp2", "moe", "ep"], {"parallel.dp_shard": 2, "parallel.ep": 2}),
}


LEFT = ("tp2", "dp2")
"""CI has these axes beside others."""


def kept(layouts: dict[str, Any], *, left: bool) -> dict[str, Any]:
    return {name: one for name, one in layouts.items() if (name in LEFT) == left}


@pytest.mark.parametrize(
    ("plugins", "layouts"),
    [
        ([], kept(DENSE, left=False)),
        (["moe"], kept(EXPERTS, left=False)),
        pytest.param([], kept(DENSE, left=True), marks=pytest.mark.extended),
        pytest.param(["moe"], kept(EXPERTS, left=True), marks=pytest.mark.extended),
    ],
)
def test_one_process_on_any_layout(plugins: list[str], layouts: Any, ranks: Pool, tmp_path: Path) -> None:
    def trained(layout: str = "") -> list[dict[str, Any]]:
        world, more, config = layouts.get(layout, (1, plugins, {}))
        arguments = {"folder": str(tmp_path / f"run{layout}"), "plugins": more, "config": {**BASE, **config}}
        return ranks.run(statistics_cases.train, world, steps=3, **arguments)

    (alone,) = trained()
    assert {key.split(".")[1] for key in alone if "." in key} == {
        "parameters",
        "gradients",
        "updates",
        "activations",
        "attention_logits",
    }
    for layout in layouts:
        for rank in trained(layout):
            assert rank.keys() == alone.keys()
            for key, right in alone.items():
                rel = 1e-3 if ".updates." in key else 1e-9 if key.endswith(".zeros") else 2e-5
                assert rank[key] == pytest.approx(right, rel=rel), (layout, key)

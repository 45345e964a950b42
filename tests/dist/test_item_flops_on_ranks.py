"""FLOPs of items on several ranks are those of one process: those of rows that ranks share are counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossed import marked
from forge_train_plugins.observers.mfu import MFU
from forge_train_tools.testing import Pool
from forge_train_tools.testing.runs import run_forge

pytestmark = [pytest.mark.dist]

LAYOUTS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "prefix, dp2": ("prefix", ("fsdp2",), {}),
    "prefix, tp2": ("prefix", ("tp",), {"parallel.tp": 2}),
    "cross_attention, cp2": ("cross_attention", ("cp", "ddp", "flex"), {"parallel.cp": 2}),
    "cross_attention, pp2": ("cross_attention", ("pp",), {"parallel.pp": 2}),
}


def counted(fusion: str, plugins: tuple[str, ...], config: dict[str, Any], folder: str) -> list[float]:
    """What each logged step's items cost, as `mfu` sees it."""
    told, original = list[float](), MFU._flops_of_items

    def telling(self: MFU, job: Any) -> float:
        told.append(original(self, job))
        return told[-1]

    every = {"decoder.kv_heads": 2, "train.global_batch": 8, "train.micro_batch": 2, "log.peak_tflops": 1.0}
    between = {"cross_attention.every": 1} if fusion == "cross_attention" else {}
    MFU._flops_of_items = telling  # type: ignore[method-assign]
    try:
        run_forge(("scans:Scans", fusion, "mfu", *plugins), {**every, **between, **config}, folder=Path(folder))
    finally:
        MFU._flops_of_items = original  # type: ignore[method-assign]
    return told


@pytest.mark.parametrize("layout", marked(LAYOUTS, ["prefix, dp2", "prefix, tp2"]))
def test_agree_with_one_process(ranks: Pool, tmp_path: Path, layout: str) -> None:
    fusion, plugins, config = LAYOUTS[layout]
    alone = counted(fusion, (), {}, str(tmp_path / "alone"))
    assert len(alone) == 3
    assert max(alone) > 0
    both = ranks.run(counted, 2, fusion=fusion, plugins=plugins, config=config, folder=str(tmp_path / "both"))
    assert both == [alone, alone]

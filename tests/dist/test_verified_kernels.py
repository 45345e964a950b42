"""`forge verify` with each attention kernel, right and wrong; and `auto` on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import crossed, marked
from forge_train_tools.testing import Pool, Verifier

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

BATCH: dict[str, Any] = {"train.global_batch": 4, "train.micro_batch": 2, "text.isolate": True}
LAYOUTS: dict[str, dict[str, Any]] = {"fsdp2": {}, "tp": {"parallel.tp": 2}}


@pytest.mark.parametrize(("kernel", "layout"), crossed(["flex", "auto", "eager", "sdpa", "varlen"], LAYOUTS))
def test_every_kernel_agrees_with_one_process(
    kernel: str, layout: str, verify: Verifier, composition_file: Path
) -> None:
    request = compositions._request(composition_file, (layout, kernel), {**BATCH, **LAYOUTS[layout]})
    verdict = verify(request, 2, steps=2)
    assert verdict.agree, verdict


@pytest.mark.parametrize(("fault", "layout"), crossed(["Leaking", "Grouping"], LAYOUTS))
def test_a_kernel_that_is_wrong_on_a_layout_is_caught(
    fault: str, layout: str, verify: Verifier, composition_file: Path
) -> None:
    request = compositions._request(composition_file, (layout, f"kernels:{fault}"), {**BATCH, **LAYOUTS[layout]})
    verdict = verify(request, 2, steps=2)
    assert not verdict.agree
    assert {"loss", "gradients"} <= verdict.failed, verdict


@pytest.mark.parametrize("layout", marked(LAYOUTS, ["tp"]))
def test_all_ranks_take_the_kernel_of_rank_0(layout: str, ranks: Pool, tmp_path: Path) -> None:
    config = {**BATCH, "train.micro_batch": 1, **LAYOUTS[layout]}
    reply, *_ = ranks.run("cases:train", 2, folder=str(tmp_path), plugins=("kernels:Opinions", layout), config=config)
    assert "opinions" in reply["plugins"]

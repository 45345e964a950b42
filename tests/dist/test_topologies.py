"""Checkpoints saved on one layout and resumed on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossed import few, marked
from forge_train_tools.testing import Pool

pytestmark = [pytest.mark.dist]

LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "one": (1, (), {}),
    "dp2": (2, (), {}),
    "dp3": (3, (), {}),
    "dp4": (4, (), {}),
    "hsdp": (4, (), {"parallel.dp_replicate": 2}),
    "zero2": (2, ("fsdp2",), {"fsdp2.reshard": "never"}),
    "ddp": (2, ("ddp",), {}),
    "zero1": (2, ("zero1",), {}),
    "cp2": (2, ("cp",), {"parallel.cp": 2}),
    "cp2 × dp2": (4, ("cp",), {"parallel.cp": 2, "cp.method": "gather"}),
}


def train(ranks: Pool, folder: Path, layout: str, **more: Any) -> dict[str, Any]:
    world, plugins, config = LAYOUTS[layout]
    folder.mkdir(exist_ok=True)
    arguments = {"folder": str(folder), "plugins": plugins, "config": config, "steps": 4, "name": "run", **more}
    first: dict[str, Any] = ranks.run("cases:train", world, **arguments)[0]
    return first


@pytest.fixture(scope="module")
def whole(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run that nothing interrupts, on one process."""
    return train(ranks, tmp_path_factory.mktemp("whole"), "one")


@pytest.mark.parametrize(
    ("before", "after"),
    few(
        [
            *(("dp2", "one"), ("one", "dp4"), ("dp2", "dp3"), ("dp3", "hsdp"), ("hsdp", "ddp"), ("ddp", "dp2")),
            *(("zero1", "dp4"), ("zero2", "zero1"), ("cp2", "one"), ("one", "cp2 × dp2")),
        ],
        [("dp3", "hsdp"), ("ddp", "dp2"), ("zero2", "zero1"), ("cp2", "one")],
    ),
)
def test_goes_on_on_another_layout(ranks: Pool, tmp_path: Path, whole: dict[str, Any], before: str, after: str) -> None:
    train(ranks, tmp_path / "runs", before, stop_at=2)
    resumed = train(ranks, tmp_path / "runs", after)
    assert len(resumed["grad_norms"]) in (1, 2)  # several ranks agree to stop one step later
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert resumed["norms"] == pytest.approx(whole["norms"], rel=1e-5)


@pytest.mark.parametrize("layout", marked(["dp2", "hsdp", "zero1", "cp2"], ["dp2", "hsdp", "cp2"]))
def test_repeats_bit_for_bit_on_the_same_layout(ranks: Pool, tmp_path: Path, layout: str) -> None:
    uninterrupted = train(ranks, tmp_path / "uninterrupted", layout)
    train(ranks, tmp_path / "resumed", layout, stop_at=2)
    resumed = train(ranks, tmp_path / "resumed", layout)
    for what in ("losses", "norms", "weights"):
        assert resumed[what] == uninterrupted[what]


def test_every_rank_keeps_its_own_random_numbers(ranks: Pool, tmp_path: Path) -> None:
    # Two ranks that are to stop at step 2 agree to do so at step 3.
    def draws(world: int, name: str, **more: Any) -> list[list[list[float]]]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return [reply["drawn"] for reply in ranks.run("cases:draws", world, folder=str(folder), **more)]

    uninterrupted = draws(2, "uninterrupted")
    assert uninterrupted[0] != uninterrupted[1]
    draws(2, "same", stop_at=2)
    assert draws(2, "same") == [steps[3:] for steps in uninterrupted]
    draws(2, "more", stop_at=2)
    three = draws(3, "more")
    assert three[:2] == [steps[3:] for steps in uninterrupted]
    assert three[2][0] not in [*uninterrupted[0], *uninterrupted[1]]
    draws(2, "fewer", stop_at=2)
    assert draws(1, "fewer") == [uninterrupted[0][3:]]

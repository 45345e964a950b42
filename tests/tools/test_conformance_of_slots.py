"""The conformance suite finds attention whose rows, side by side, are not what each is alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_train import ConfigError, Job, Plugin, hookimpl
from forge_train_kit import hookspecs
from forge_train_kit.layers import AttentionOptions, Layer
from forge_train_kit.model import SlotCache, Slots
from forge_train_plugins.attention._gqa import GroupedQueryAttention
from forge_train_tools.testing import Report, check


class Forgetful(SlotCache):
    """Does not see the newest position."""

    def add(self, *values: Tensor) -> Any:
        found = super().add(*values)
        return None if found is None else (found[0], found[1] - 1)


class Mixer(GroupedQueryAttention):
    made: type[SlotCache] = SlotCache

    def new_slots(self, slots: Slots) -> SlotCache:
        return self.made(slots)


class Mixing(Plugin):
    """Grouped-query attention again."""

    api = (1, 0)

    @hookimpl
    def attention(self, layer: Layer, job: Job) -> Any:
        return Mixer(layer, hookspecs.attention_kernel(job))


def found(folder: Path) -> str:
    report: Report = check(Mixing, folder=folder)
    return next(one.status for one in report.checks if one.name.endswith("continues rows side by side"))


@pytest.mark.unit
def test_a_row_that_forgets_its_newest_position_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(tmp_path / "right") == "ok"
    monkeypatch.setattr(Mixer, "made", Forgetful)
    assert found(tmp_path / "wrong") == "fail"


@pytest.mark.unit
def test_lengths_are_refused_beside_what_they_leave_out() -> None:
    for beside in ({"window": 2}, {"offset": 0}, {"document_ids": torch.zeros(1, 3, dtype=torch.int64)}):
        with pytest.raises(ConfigError, match="no lengths of rows beside"):
            AttentionOptions(lengths=torch.tensor([1]), **beside)  # type: ignore[arg-type]

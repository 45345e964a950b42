"""Tasks in the background of training."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from forge_train.checkpoint.seal import ALONE
from forge_train_kit.background import Background
from saving import Lingering

pytestmark = [pytest.mark.unit]


@pytest.mark.parametrize("fails", [False, True])
def test_a_task_has_ended_when_its_work_is_over_although_its_thread_lives(fails: bool) -> None:
    thread = Lingering()

    def task() -> float:
        thread.keep()
        return 1 / (not fails)

    background = Background(task, ALONE)
    assert thread.over.wait(60)
    assert background.ended()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        assert background.result() == 1
    assert not thread.gone.is_set()
    thread.may_go.set()

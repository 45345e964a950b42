"""The plugin `sample`: it writes a text, and leaves the run bit for bit the one without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from forge_train import Plugin, hookimpl
from forge_train_tools.testing.runs import RunForge

CONFIG = {"sample": {"prompt": "the ", "tokens": 20, "seed": 3}}


@pytest.mark.unit
def test_a_sample_is_shown_and_kept(run_forge: RunForge) -> None:
    done = run_forge(["sample"], CONFIG)
    ((title, text),) = done.finished.closing
    assert title == "A sample"
    assert text.startswith("the ")
    assert len(text) > 10
    assert (done.run / "artifacts" / "sample.txt").read_text(encoding="utf-8") == text + "\n"


@pytest.mark.unit
def test_the_run_is_the_one_without_it(run_forge: RunForge) -> None:
    with_sample, without = run_forge(["sample"], CONFIG), run_forge()
    assert with_sample.numbers == without.numbers
    for left, right in zip(with_sample.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(left, right)
        assert right.grad is None
    assert all(part.training for part in with_sample.model.parts)


@pytest.mark.unit
def test_it_writes_with_the_weights_that_are_evaluated(run_forge: RunForge) -> None:
    spans: list[str] = []

    class Watch(Plugin):
        """Notes what happens within evaluations."""

        @hookimpl
        def around(self, span: str) -> object:
            @contextmanager
            def noted() -> Iterator[None]:
                spans.append("in")
                yield
                spans.append("out")

            return noted if span == "evaluate" else None

    run_forge(["sample", Watch], CONFIG | {"train.evaluate_every": 0})
    assert spans == ["in", "out"]


@pytest.mark.unit
def test_an_interrupted_run_has_no_sample(run_forge: RunForge) -> None:
    done = run_forge(["sample"], CONFIG, stop_at=2)
    assert done.finished.outcome == "interrupted"
    assert not done.finished.closing
    assert not (done.run / "artifacts" / "sample.txt").exists()


@pytest.mark.unit
def test_a_model_that_can_not_generate_costs_only_the_sample(
    run_forge: RunForge, caplog: pytest.LogCaptureFixture
) -> None:
    experts = {"moe": {"router": "expert_choice", "balance": 0.0}}
    done = run_forge(["sample", "moe"], {**CONFIG, **experts})
    assert done.finished.outcome == "done"
    assert "There is no sample: This model can't generate text: under moe.router = 'expert_choice'" in caplog.text


@pytest.mark.unit
def test_a_prompt_that_is_too_long_costs_only_the_sample(run_forge: RunForge, caplog: pytest.LogCaptureFixture) -> None:
    done = run_forge(["sample"], {"sample": {"prompt": "a" * 80}})
    assert done.finished.outcome == "done"
    assert not done.finished.closing
    assert "There is no sample: The prompt has 80 tokens" in caplog.text

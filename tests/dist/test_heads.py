"""A head, a task and a loss of a third party fit each other, on one and two ranks; those that do not are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from forge_train import ConfigError
from forge_train_tools.testing import Pool, RunForge

pytestmark = [pytest.mark.dist]

CLASSES = ("heads:Counting", "heads:ClassHead", "heads:ClassTask", "heads:ClassLoss")
REGRESSION = ("heads:Counting", "heads:Regression")
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "dp2": (("fsdp2",), {"parallel.dp_shard": 2}),
    "tp2": (("tp",), {"parallel.tp": 2}),
    "tp2, whole sequences": (("tp",), {"parallel.tp": 2, "tp.sequence_parallel": False}),
}
TINY = {"train.micro_batch": 6, "train.evaluate_every": 3, "adamw.lr": 2e-3}


def train(ranks: Pool, folder: Path, world: int, plugins: tuple[str, ...], config: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir()
    arguments = {"folder": str(folder), "plugins": plugins, "config": {**TINY, **config}, "steps": 6}
    reply: dict[str, Any] = ranks.run("cases:train", world, **arguments)[0]
    return reply


@pytest.mark.parametrize("plugins", [pytest.param(CLASSES, marks=pytest.mark.extended), REGRESSION])
def test_sequences_are_learned_alike_on_one_process_and_on_two(
    ranks: Pool, tmp_path: Path, plugins: tuple[str, ...]
) -> None:
    alone = train(ranks, tmp_path / "one", 1, plugins, {})
    assert alone["losses"][-1] < 0.9 * alone["losses"][0]
    assert not {"lm_head", "next_token", "text"} & {*alone["plugins"]}
    for name, (more, config) in LAYOUTS.items():
        reply = train(ranks, tmp_path / name, 2, (*plugins, *more), config)
        for what in ("losses", "norms", "evaluations"):
            assert reply[what] == pytest.approx(alone[what], rel=1e-4), (name, what)


@pytest.mark.parametrize(
    ("plugins", "says"),
    [
        (
            ("heads:ClassHead",),
            [
                "Plugin 'next_token' (forge-train 0.1.0) takes 'token_logits' from the slot 'head', but plugin 'class",
                "gives 'class_logits'. Enable another plugin for one of them.",
                "Plugin 'cross_entropy' (forge-train 0.1.0) takes 'token_logits' or 'text_class_",
            ],
        ),
        (
            ("heads:ClassTask",),
            ["Plugin 'class_task'", "takes 'class_logits' from the slot 'head', but plugin 'lm_head'"],
        ),
        (
            ("heads:ClassHead", "heads:ClassTask"),
            ["Plugin 'cross_entropy' (forge-train 0.1.0) takes 'token_labels' from the slot 'task', but plugin 'cla"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name_before_anything_starts(
    run_forge: RunForge, tmp_path: Path, plugins: tuple[str, ...], says: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        run_forge(plugins, folder=tmp_path / "runs")
    for text in says:
        assert text in str(error.value)
    assert not [path for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")]


def test_a_head_that_can_not_be_tied_is_untied(run_forge: RunForge, caplog: pytest.LogCaptureFixture) -> None:
    run = run_forge(CLASSES, {"decoder.tied": True}, steps=1)
    assert (
        "decoder.tied: untied, because the head of plugin 'class_head' can't share the embedding's weights"
        in caplog.text
    )
    assert math.isfinite(run.losses[0])

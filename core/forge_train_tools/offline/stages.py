"""The stages of a run's data, as declared by its plugins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge_train.base.errors import PluginError
from forge_train.mesh.layout import Layout
from forge_train.mesh.world import World
from forge_train.plugin.job import Job
from forge_train.registry.setup import Setup
from forge_train_kit import hookspecs
from forge_train_kit.format import format_length

from ..hookspecs import data_stages
from ..planning.imagined import imagined
from .read_only import ReadOnlyRun

STAGES = ("source", "decode", "render", "tokenise", "filter", "map", "pack", "order", "batch")


@dataclass(frozen=True)
class Stage:
    """A line about a stage."""

    stage: str
    plugin: str
    """The plugin that describes it; empty for forge itself."""
    text: str


def stages(setup: Setup, world: int) -> list[Stage]:
    """Every stage that a plugin describes, in the order in which data passes through them. Plugins are asked as the
    first of `world` ranks.

    Raises:
        PluginError: if a plugin describes an unknown stage.
    """
    layout, hooks = Layout.of(setup.config.parallel, world), setup.hooks
    with imagined(layout, World(size=world)) as dist:
        job = Job.of(setup.config, hooks, ReadOnlyRun(Path()), dist)
        told = data_stages(job)
        found = [Stage(stage, name, text) for name, lines in told for stage, text in lines]
    if wrong := next((one for one in found if one.stage not in STAGES), None):
        raise PluginError(
            f"{hooks.whose('data_stages', wrong.plugin)}: there is no stage {wrong.stage!r}; stages are "
            f"{', '.join(STAGES)}."
        )
    tellers, provider = {name for name, _ in told}, hooks.provider("build_data") or ""
    if provider not in tellers:
        found.append(Stage("source", provider, "does not describe its data (data_stages)"))
    tokenizer = hooks.provider("tokenizer")
    if tokenizer and tokenizer not in tellers:
        found.append(Stage("tokenise", tokenizer, f"{hookspecs.tokenizer(job).vocabulary:,} token ids"))
    silent = (name for name in hooks.implementers("prepare_batch") if name not in tellers)
    found += [Stage("map", name, "changes each batch before the model gets it (prepare_batch)") for name in silent]
    found.append(Stage("batch", "", _batch(setup, layout)))
    return sorted(found, key=lambda one: STAGES.index(one.stage))


def _batch(setup: Setup, layout: Layout) -> str:
    train, ranks = setup.config.train, layout.dp
    passes = layout.micro_batches(train.global_batch, train.micro_batch)
    warm = "; smaller at first (train.batch_warmup)" if train.batch_warmup else ""
    return (
        f"{train.sequence:,} tokens × {train.micro_batch:,} sequences × {ranks:,} data ranks × {passes:,} passes = "
        f"{train.tokens_per_step:,} tokens a step{warm}; {format_length(train.epochs, train.total_steps)}"
    )

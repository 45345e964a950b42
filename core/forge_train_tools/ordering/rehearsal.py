"""The calls of one rank: from its composition to what a checkpoint gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch._subclasses.fake_tensor import FakeTensorMode

from forge_train.compose.compose import compose
from forge_train.contract.batch import MicroBatch
from forge_train.contract.model import Model
from forge_train.loop.assembly import build_stepper
from forge_train.loop.resume import stateful
from forge_train.mesh.layout import Layout
from forge_train.mesh.world import World
from forge_train.plugin import hookspecs
from forge_train.plugin.job import Job
from forge_train.registry.setup import Setup
from forge_train.run.run import Run
from forge_train.step.step import Stepper, Watcher

from ..planning.alike import FEW, WORTH, Units, per_unit, repeating
from ..planning.fewer import passes_of
from ..planning.imagined import ImaginedContext, imagined
from ..planning.record import Recorded
from ..planning.rehearsal import Examples, allocate_all, first_step, quiet, unseen_metadata
from ..planning.watch import AnyDtype, Together
from ..tracing.callers import Callers, owners
from .record import Called, Order, during


@dataclass(frozen=True)
class Rehearsed:
    """The calls of a rank, and what could not be rehearsed."""

    calls: tuple[Called, ...]
    notes: tuple[str, ...] = ()


class Ranks:
    """Rehearses ranks of a world.

    Args:
        setup: a checked configuration and its plugins.
        layout: of the world.
        place: any rank of it.
        folder: what plugins are told the run folder is.
    """

    def __init__(self, setup: Setup, layout: Layout, place: World, folder: Path) -> None:
        self._setup, self._layout, self._place, self._folder = setup, layout, place, folder
        self._given: list[list[Any]] | None = None
        self._gone: Sequence[int] | None = None
        self.micro_batches = 0
        """Of a step that was rehearsed."""

    def rehearse(self, rank: int) -> Rehearsed:
        """Compose for a rank, and take a step.

        Raises:
            ForgeError: for what a run would be refused for.
        """
        if self._layout.pp > 1 and self._given is None:
            given = [self._gives(one) for one in self._first_of_stages()]
            # If one stage gathers more often than another, which the check will tell, answers would be mixed up.
            self._given = given if len({len(one) for one in given}) == 1 else []
        gone = self._left_out(rank)
        with imagined(self._layout, self._at(rank), self._given or ()) as context:
            job = self._job(context)
            order = Order(context, Callers(job, owners(hookspecs.parallelize(job))))
            with during(order, "composition"):
                composition = compose(job, allocate=False, change=Units(gone).look)
            notes = self._step(job, composition.model, order)
        notes += [f"{place}: its group follows no axis of the layout" for place in sorted(order.left_out)]
        return Rehearsed(tuple(order.calls), tuple(notes))

    def _first_of_stages(self) -> range:
        return range(0, self._layout.world, self._layout.world // self._layout.pp)

    def _at(self, rank: int) -> World:
        size = self._place.local_size
        return World(rank=rank, size=self._layout.world, local_rank=rank % size, local_size=size)

    def _gives(self, rank: int) -> list[Any]:
        """Compose without knowing what other stages say."""
        with imagined(self._layout, self._at(rank)) as context:
            compose(self._job(context), allocate=False)
            return context.given

    def _job(self, context: ImaginedContext) -> Job:
        return Job.of(self._setup.config, self._setup.hooks, Run(self._folder), context)

    def _left_out(self, rank: int) -> Sequence[int]:
        """Units that are like those before and after them, and call the same. A pipeline is cut by units: it keeps
        all."""
        if self._layout.pp > 1:
            return ()
        if self._gone is None:
            self._gone = ()
            units = Units()
            with imagined(self._layout, self._at(rank)) as context:
                job = self._job(context)
                composition = compose(job, allocate=False, change=units.look)
                alone = len(composition.model.parts) == 1 and not composition.extra
                found = repeating(units) if alone and per_unit(job, composition) else None
            if found and found.times >= WORTH:
                self._gone = range(found.first + found.size * FEW, found.first + found.size * found.times)
        return self._gone

    def _step(self, job: Job, model: Model, order: Order) -> list[str]:
        found = Recorded()
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            allocate_all(job, model)
            stepper = build_stepper(job, model, _Parts(order, found))
            self.micro_batches = passes_of(stepper, found, exact=False)
            whole = False
            with found.trying(lambda: "collectives of the optimizer"):
                first_step(model, stepper.optimizer)
                whole = True
        with found.trying(lambda: f"collectives from {order.part} on"), quiet():
            self._rehearse(stepper, order, fake, whole=whole)
        return found.notes

    def _rehearse(self, stepper: Stepper, order: Order, fake: FakeTensorMode, *, whole: bool) -> None:
        job, model = stepper.job, cast("Any", stepper.model)
        model.train()
        with during(order, "data"):
            batches, counts = stepper.fetch(stepper.loader, self.micro_batches)
        after = model.after_backward

        def ended() -> None:
            order.part = "gradients"
            after()

        model.after_backward = ended
        order.part = "forward"
        with fake, unseen_metadata(), Together(AnyDtype(), order):
            batches = [batch.map(fake.from_tensor) for batch in batches]
            job.step.batches = batches
            update = stepper.gradients(1, batches, counts)
            if whole:
                order.part = "optimizer"
                stepper.apply(update)
        del model.after_backward
        with during(order, "checkpoint"):
            stepper.optimizer.state_dict()
            for _, plugin in stateful(job):
                plugin.state_dict()


class _Parts(Watcher):
    """Tells the order which part of the step begins."""

    def __init__(self, order: Order, found: Recorded) -> None:
        self._order, self._found = order, found

    def data(self, job: Job, split: str) -> Examples:
        return Examples(job, self._found)

    def on_micro_batch(self, micro: MicroBatch) -> None:
        self._order.part = "forward" if micro.direction in ("both", "forward") else "backward"

"""A run whose tensors leave the device and come back, between micro-batches, after steps and while it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from forge_train import Applied, Job, Model, Phase, Plugin, StepResult, Transform, hookimpl
from forge_train_kit.sleep import asleep
from forge_train_tools.testing import run_forge

from .case import Row, Size
from .runs import folder, small, weights

CYCLES, EARLY = 100, 10


class Naps(Plugin):
    """Sleeps whenever it can, and notes what that frees."""

    api = (1, 0)
    to: ClassVar[Path | None] = None
    freed: ClassVar[list[tuple[int, int, int]]] = []
    """Bytes by `asleep`, bytes that tensors asked the device for, and bytes that it gave them."""

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        def apply(part: nn.Module) -> Applied:
            names = tuple(name for name, _ in part.named_parameters())
            return Applied(part, names, on_micro_batch=lambda _: self.nap())

        return Transform(Phase.COMPILE, "naps", apply)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.all = job, model, optimizer

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self.nap()

    def nap(self) -> None:
        asked, given = held(self.all[0].device)
        with asleep(*self.all, folder=Naps.to) as sleeping:
            still = held(self.all[0].device)
            Naps.freed.append((sleeping.bytes, asked - still[0], given - still[1]))
            sleeping.wake("weights")  # the rest wakes at the end


def held(device: torch.device) -> tuple[int, int]:
    """Bytes of device memory that tensors asked for, and those of the blocks that they were given."""
    if device.type == "cpu":
        return 0, 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # blocks that another stream has used are only counted out here
    found = torch.cuda.memory_stats()
    return found["requested_bytes.all.current"], found["allocated_bytes.all.current"]


def naps(size: Size, disk: bool) -> list[Row]:
    """A run that sleeps against one that does not: the same bits; and what it frees, again and again."""
    saving = {"checkpoint.every": 1, "checkpoint.keep": 9, "checkpoint.asynchronous": True}
    shape = size.choose({"decoder.dim": 256}, {"decoder.hidden": 256})
    values = small(size, **{"run.deterministic": True, **shape, **saving})
    Naps.freed.clear()
    with folder() as one, folder() as other, folder() as away:
        Naps.to = away if disk else None
        right = run_forge((), values, folder=one)
        found = run_forge([Naps], values, folder=other)
        files = [file.relative_to(right.run) for file in sorted(right.run.glob("checkpoints/step-*/*.safetensors"))]
        same = sum((found.run / file).read_bytes() == (right.run / file).read_bytes() for file in files)
        alike = right.numbers == found.numbers and weights(right) == weights(found)
        cycled = cycles(found.job, found.model, found.optimizer)
    own = sum(one.nbytes for one in found.model.parameters())
    most = max(one[0] for one in Naps.freed) / own
    least = 4 if size.device == "cuda" else 3  # on a CPU, parts of pages stay
    rows = [
        Row("metrics and weights, against a run that does not sleep", *_equal(alike)),
        Row("files of checkpoints equal to its", f"{same} of {len(files)}", "all", 0 < same == len(files)),
        Row("most that is away / weights", f"{most:.2f}", f"≥ {least}", most >= least),
    ]
    if size.device == "cuda":
        exact, of = sum(said == asked for said, asked, _ in Naps.freed), len(Naps.freed)
        blocks = min(given / max(said, 1) for said, _, given in Naps.freed)
        rows += [
            Row("sleeps that free the bytes it says, to the byte", f"{exact} of {of}", "all", exact == of),
            Row("least that memory_allocated falls by / the bytes it says", f"{blocks:.4f}", "≥ 1", blocks >= 1),
        ]
    return [*rows, *cycled]


def cycles(job: Job, model: Model, optimizer: Any) -> list[Row]:
    """Many sleeps: memory, objects and addresses afterwards."""
    parameters = list(model.parameters())
    objects = [*map(id, parameters), *map(id, optimizer.state)]
    before, early = [one.data_ptr() for one in parameters], (0, 0)
    for turn in range(1, CYCLES + 1):
        with asleep(job, model, optimizer, folder=Naps.to):
            pass
        if turn == EARLY:
            early = held(job.device)[0], resident()
    grown, host = held(job.device)[0] - early[0], resident() / early[1] - 1
    stay = sum(one.data_ptr() == address for one, address in zip(parameters, before, strict=True))
    kept = objects == [*map(id, model.parameters()), *map(id, optimizer.state)]
    return [
        Row(f"bytes of the device after {CYCLES} cycles, more than after {EARLY}", str(grown), "0", grown == 0),
        Row("the same of the process's own memory", f"{host:.2%}", "≤ 1%", host <= 0.01),
        Row("parameters and the optimizer's keys are the same objects", *_yes(kept)),
        Row("parameters at their address", f"{stay} of {len(parameters)}"),
    ]


def resident() -> int:
    """Pages of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])


def _equal(same: bool) -> tuple[str, str, bool]:
    return "equal" if same else "different", "equal", same


def _yes(true: bool) -> tuple[str, str, bool]:
    return "yes" if true else "no", "yes", true

"""Record of an abnormal step: the outlying gradient, and the batch, kept in the run's artifacts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from forge_train import Batch, Job

if TYPE_CHECKING:
    from torch import Tensor

    from .judge import AnomalyKind


@dataclass(frozen=True)
class Suspect:
    """A gradient that stands out among those of a rank."""

    place: int
    """In the order of the rank's parameters."""
    name: str
    norm: float
    """Of what the rank holds."""
    bad: int
    """Gradients of the rank that are not finite."""


@dataclass(frozen=True)
class Witness:
    """An abnormal step."""

    step: int
    kind: AnomalyKind
    text: str
    policy: str
    data_range: tuple[int, int]
    """Global sequences that it was trained on."""

    def record(
        self,
        names: Sequence[str],
        norms: Sequence[tuple[Sequence[int], Tensor]],
        batches: Sequence[Batch],
        job: Job,
        author: object,
    ) -> tuple[str, str]:
        """Name the gradient that stands out, and keep the batch; all ranks call this.

        Args:
            names: of the parameters that had gradients on this rank.
            norms: as `Update.norms`.
            batches: this rank's micro-batches; none to keep nothing.
            job: the run.
            author: the plugin.

        Returns:
            What is to be said of the gradient, and the folder of what was kept; each may be empty.
        """
        everybody = job.dist.gather_objects((job.dist.data_rank, suspect(names, norms), len(batches)))
        found = {rank: one for rank, (_, one, _) in enumerate(everybody) if one is not None}
        said = self._said(found, job.dist.world // job.dist.layout.pp)
        keep = all(count for _, _, count in everybody)
        if keep and [data for data, _, _ in everybody].index(job.dist.data_rank) == job.dist.rank:
            self._keep(batches, job, author)
        if keep and job.dist.main:
            file = job.run.artifact(f"{self._stem}.json")
            told = {**asdict(self), "suspects": {str(rank): asdict(one) for rank, one in found.items()}}
            file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
            job.record(file, author)
        return said, f"{job.run.dir / 'artifacts' / 'anomaly'}" if keep else ""

    @property
    def _stem(self) -> str:
        return f"anomaly/step-{self.step:08d}-sequence-{self.data_range[0]}"

    def _said(self, found: dict[int, Suspect], ranks_of_stage: int) -> str:
        """Of all ranks' suspects. The backward pass begins at the end of the model, so what it met first is last."""
        if self.kind == "spike":
            largest = max(found.items(), key=lambda one: one[1].norm, default=None)
            return f"; {largest[1].name} on rank {largest[0]} has the largest gradient" if largest else ""
        bad = {rank: one for rank, one in found.items() if one.bad}
        if not bad:
            return ""
        first = max(bad, key=lambda rank: (rank // ranks_of_stage, bad[rank].place, -rank))
        ranks = sorted(rank for rank in bad if bad[rank].name == bad[first].name)
        where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return f"; the backward pass met it first in {bad[first].name}, on {where}"

    def _keep(self, batches: Sequence[Batch], job: Job, author: object) -> None:
        from safetensors.torch import save_file

        tensors = {
            f"{number}.{name}": tensor.detach().cpu().contiguous().clone()
            for number, batch in enumerate(batches)
            for name, tensor in batch.tensors().items()
        }
        file = job.run.artifact(f"{self._stem}-data-{job.dist.data_rank}.safetensors")
        save_file(tensors, file, metadata={"step": str(self.step), "sequences": "{}-{}".format(*self.data_range)})
        job.record(file, author)


def suspect(names: Sequence[str], norms: Sequence[tuple[Sequence[int], Tensor]]) -> Suspect | None:
    """The last gradient of this rank that is not finite, or else the largest; None if there is none."""
    read = [pair for places, held in norms for pair in zip(places, held.tolist(), strict=True)]
    if not read:
        return None
    bad = [place for place, norm in read if not math.isfinite(norm)]
    place, norm = max(pair for pair in read if pair[0] in bad) if bad else max(read, key=lambda pair: pair[1])
    return Suspect(place, names[place], norm if math.isfinite(norm) else -1.0, len(bad))

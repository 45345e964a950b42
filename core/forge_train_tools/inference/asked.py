"""A forward-only job as it is asked for, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from forge_train.base.errors import ConfigError
from forge_train.mesh.layout import Layout

from ..offline.opening import Source, Wanted, find
from .encoding import Long
from .forms import form_of


class InferenceOptions(TypedDict, total=False):
    """Some fields of `Inference`, as keywords."""

    field: str
    long: Long
    template: str
    batch: int


@dataclass(frozen=True, kw_only=True)
class Inference:
    """A forward-only job, as it was asked for.

    Args:
        path: a run, a checkpoint or a Hugging Face folder.
        data: files, folders, patterns or addresses.
        out: the file to write, which does not exist: .jsonl, .parquet or .safetensors.
        outputs: names; empty for what fits the head.
        field: of records that holds the text; empty for `text`, or `prompt` and `completion`.
        long: treatment of records that are longer than what the model reads at once.
        template: for chats, another than the model's: `chatml`, `llama3`, `plain` or a file.
        batch: records of a micro-batch.
        plugins: to enable too; so is `set`, values to override.
    """

    path: Path
    data: tuple[str, ...]
    out: Path
    outputs: tuple[str, ...] = ()
    field: str = ""
    long: Long = "refuse"
    template: str = ""
    batch: int = 8
    plugins: tuple[str, ...] = ()
    set: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"--batch: expected at least 1, found {self.batch}.")
        form_of(self.out)

    def source(self, world: int) -> Source:
        """The weights, and a configuration whose global batch has a micro-batch for each stage of each data-parallel
        rank."""
        source = self._source(world, self.batch * world)
        layout = Layout.of(source.setup.config.parallel, world)
        together = layout.dp * layout.pp
        return source if together == world else self._source(world, self.batch * together)

    def _source(self, world: int, together: int) -> Source:
        sizes = (f"train.micro_batch={self.batch}", f"train.global_batch={together}")
        return find(self.path, world=world, wanted=Wanted(self.plugins, (*sizes, *self.set), data=False))


@dataclass(frozen=True)
class Inferred:
    """Results of a forward-only job."""

    checkpoint: str
    step: int
    world: int
    out: str
    records: int
    tokens: int = 0
    """Tokens of the records that this command read, padding left out."""
    seconds: float = 0.0
    not_finite: int = 0
    """Records whose outputs are not all finite, of those that this command read."""
    cut: int = 0
    """Records that were cut on their left, likewise."""

"""The base of data plugins whose records are answers to compare. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from forge_train import ConfigError, Ge, Lt, Plugin, Problem, Volatile, hookimpl, section

from .. import hookspecs
from ..capabilities import KernelCapabilities

if TYPE_CHECKING:
    import torch

    from forge_train import CheckpointEvent, Finished, Job, Loader, Model
    from forge_train.config import Config as RunConfig

    from .documents import Documents
    from .held_out import Side
    from .prepare import Preparation
    from .rows import Pieces
    from .stream import Stream


@section
class PreferenceSection:
    """Options of every data plugin whose records are answers to compare."""

    path: str | tuple[str, ...] = ""
    """Files, folders, patterns or addresses of the records."""
    template: str = ""
    """The chat template; see `sft.template`. Exports get it with the tokenizer."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """See `sft.template_options`."""
    split_special_tokens: bool = False
    """See `sft.split_special_tokens`."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """See `sft.rename`."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """See `sft.roles`."""
    long: Literal["refuse", "drop", "left", "right"] = "refuse"
    """Treatment of a text longer than a row: it ends the run, is left out together with its pair, or loses tokens on
    its left or right."""
    held_out: Annotated[float, Ge(0), Lt(1)] = 0.02
    """Share of the records kept for evaluation."""
    shuffle: bool = True
    """Use a different order of the records in every epoch."""
    cache: Annotated[str, Volatile()] = ""
    """Folder for cached tokens; empty means the folder of the plugin's name in forge-train, in $XDG_CACHE_HOME or
    ~/.cache."""


class PreferencePlugin(Plugin):
    """A data plugin that renders records with answers, and whose section is a `PreferenceSection`.

    Two documents of the prepared folder are a record. A plugin says how it reads records (`records`), in which order
    its rows come (`stream`), and what it does at each stage.
    """

    api = (1, 0)
    requires = ("tokenizer",)
    key: ClassVar[str]
    """The plugin's section."""
    unit: ClassVar[str]
    """Of what is counted, in the plural."""
    wants: ClassVar[str]
    """The path that is missing, for messages."""
    too_few: ClassVar[str]
    """The number that is too small to begin with, for messages."""
    target: ClassVar[str]
    """Name of `Arrays.sources` in a batch."""
    group: ClassVar[int] = 1
    """Documents of one unit."""
    chat: bool = True
    """True if a chat template renders the records."""
    packing: str = "pad"
    """`pad`, one text in a row, or `best_fit`, several."""
    config: Any
    _sides: Mapping[Side, Any] | None = None
    _epoch: Pieces | None = None
    _job: Job | None = None

    def records(self) -> Mapping[str, Any]:
        """The arguments of a `Preparation` that read the records."""
        raise NotImplementedError

    def documents(self, found: Documents) -> Documents:
        """The documents that are laid out in rows, of one side of the prepared folder."""
        return found

    def pieces(self, documents: Documents, sequence: int) -> Pieces:
        """The contents of rows of `sequence` tokens."""
        from .fit import fitted

        long, packing = self.config.long, self.packing
        return fitted(documents, sequence, long=long, packing=packing, key=self.key, together=self.group)

    def stream(self, documents: Any, sequence: int, pieces: Pieces, pad: int, **order: Any) -> Stream:
        """The rows of one side; `order` are the arguments `seed`, `key` and `fixed` of a stream."""
        raise NotImplementedError

    def sources(self, job: Job, each: str, row: str) -> Iterator[tuple[str, str]]:
        """Yield the stages that all these plugins have: for `data_stages`.

        Args:
            each: the name of a record.
            row: the contents of a row.
        """
        from .files import find
        from .manifest import FILE, open_prepared
        from .stages import counted, order, padding

        yield "order", order(job, shuffle=self.config.shuffle)
        try:
            files, known = find(self.config.path, key=f"{self.key}.path"), ""
            wanted = self._wanted(job)
            if (wanted.out / FILE).is_file():
                found = open_prepared(wanted.out, key=f"{self.key}.path").sides
                known = "; " + ", ".join(f"{one.count // 2:,} {self.unit} for {side}" for side, one in found.items())
                pieces = self.pieces(self.documents(found["train"]), job.config.train.sequence)
                row += f"; {padding(pieces, job)}"
            yield "source", f"{counted(files)}{known}"
            yield "decode", f"each record is {each}"
        except ConfigError as error:
            yield "source", str(error)
        yield "pack", row

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        if not self.config.path:
            yield Problem(f"{self.key}.path", f"required: {self.wants}.", data=True)

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities | None:
        return KernelCapabilities(documents=True)

    @hookimpl
    def build_data(self, job: Job, split: Side) -> Loader:
        from .loader import StreamLoader, warn_of_few
        from .stream import HELD_OUT_SEED

        documents, sequence, held_out = self._open(job)[split], job.config.train.sequence, split == "validation"
        pieces = self.pieces(documents, sequence)
        if len(pieces.document) < 2:
            advice = f": raise {self.key}.held_out, or set train.evaluate_every = 0"
            which = f"evaluation{advice}" if held_out else "training"
            raise ConfigError(f"{self.key}.path: {self.config.path} leaves {self.too_few} for {which}.")
        if not held_out:
            self._epoch = pieces
        seed, pad = job.seed if self.config.shuffle else None, hookspecs.tokenizer(job).end or 0
        order = {"seed": HELD_OUT_SEED if held_out else seed, "key": self.key, "fixed": held_out}
        stream = self.stream(documents, sequence, pieces, pad, **order)
        warn_of_few(getattr(stream, "samples", None), job)
        return StreamLoader(stream, job, target=self.target)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """Say how much is learned, and how much of the rows is padding."""
        from . import progress
        from .learned import tell_learned
        from .stages import padding

        if job.dist.main and self._sides is not None and self._epoch is not None:
            tell_learned(self.key, self.unit, self._sides, self._epoch, job, group=self.group)
            progress.tell(f"{self.key}: {padding(self._epoch, job)}")
        self._job = job

    @hookimpl
    def on_checkpoint(self, event: CheckpointEvent) -> None:
        """Complete the tokenizer's files, which exports and `forge generate` read."""
        from .chats import save_template

        if event.kind == "saving" and self.chat and self._job is not None:
            save_template(self._job, self.config.template, self.config.template_options)

    @hookimpl
    def on_end(self, finished: Finished, job: Job) -> None:
        from .chats import save_question

        if finished.outcome == "done" and job.hooks.gives("head") == "token_logits":
            save_question(job, self)

    def _open(self, job: Job) -> Mapping[Side, Any]:
        if self._sides is None:
            from .prepare.cached import obtained

            found = obtained(self._wanted(job), job, self.key).sides
            self._sides = {side: self.documents(one) for side, one in found.items()}
        return self._sides

    def _wanted(self, job: Job) -> Preparation:
        from .prepare.cached import wanted_of

        config = self.config
        same = ("held_out", "template", "template_options", "rename", "roles", "split_special_tokens")
        more = {**{name: getattr(config, name) for name in same}, **self.records()}
        return wanted_of(job, config.path, config.cache, self.key, chat=self.chat, **more)

"""Conversations as training data: supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from forge_train import Batch, ConfigError, Ge, KernelCapabilities, Lt, Plugin, Problem, Volatile, hookimpl, section
from forge_train.contract.protocols import Loader

if TYPE_CHECKING:
    import torch

    from forge_train import Job, Model, Tokenizer
    from forge_train.config import Config as RunConfig
    from forge_train_data.documents import Documents
    from forge_train_data.held_out import Side
    from forge_train_data.prepare import Preparation


class SFT(Plugin):
    """Conversations, rendered by the tokenizer's chat template; only what the assistant says is learned.

    Reads `{"messages": …}`, ShareGPT, `{"prompt", "completion"}` and Alpaca, from every file format there is. What is
    learned includes the token that ends the assistant's turn. Whole conversations are packed into rows. The run's copy
    of the tokenizer's files gets the template and the token that ends a turn, so that an export stops there.
    """

    api = (1, 0)
    requires = ("tokenizer",)

    @section
    class Config:
        path: str | tuple[str, ...] = ""
        """Files, folders, patterns or addresses with one conversation in each record."""
        template: str = ""
        """The chat template: `chatml`, `llama3`, `plain`, a file, or the name of one of the tokenizer's; empty for its
        own."""
        learn: Literal["assistant", "last", "all"] = "assistant"
        """What is learned: every turn of the assistant, its last one, or all tokens."""
        long: Literal["refuse", "drop", "left", "right"] = "refuse"
        """What becomes of a conversation that is longer than a row: it ends the run, is left out, or loses tokens on
        its left or right."""
        packing: Literal["best_fit", "pad"] = "best_fit"
        """Several conversations in a row, or one."""
        held_out: Annotated[float, Ge(0), Lt(1)] = 0.02
        """Share of the conversations that is kept for evaluation."""
        shuffle: bool = True
        """Take the rows in another order in every epoch."""
        cache: Annotated[str, Volatile()] = ""
        """Folder for tokens; empty for forge-train/sft in $XDG_CACHE_HOME or ~/.cache."""

    config: Config
    _sides: Mapping[Side, Documents] | None = None

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        if not self.config.path:
            yield Problem("sft.path", "required: your conversations, such as chats.jsonl.", data=True)

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities | None:
        return KernelCapabilities(documents=True)

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        from forge_train_data.fit import fitted
        from forge_train_data.loader import StreamLoader
        from forge_train_data.rows import PackedRows
        from forge_train_data.stream import HELD_OUT_SEED, Ordered

        documents, sequence = self._open(job)[split], job.config.train.sequence
        pieces = fitted(documents, sequence, long=self.config.long, packing=self.config.packing, key="sft")
        rows = PackedRows(documents, sequence, pieces, pad=job.hooks.tokenizer().end or 0)
        if not rows.count:
            which = (
                "training" if split == "train" else "evaluation: raise sft.held_out, or set train.evaluate_every = 0"
            )
            raise ConfigError(f"sft.path: {self.config.path} leaves no conversation for {which}.")
        seed = HELD_OUT_SEED if split == "validation" else job.seed if self.config.shuffle else None
        return StreamLoader(Ordered(rows, seed, key="sft", fixed=split == "validation"), job)

    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        from forge_train_data.files import find
        from forge_train_data.fit import fitted
        from forge_train_data.manifest import FILE, open_prepared
        from forge_train_data.stages import counted, held_out, order, packed, sides

        config, rows = self.config, None
        yield "render", f"chat template: {config.template or 'of the tokenizer'}; learned: {config.learn}"
        yield "filter", held_out(config.held_out, "conversations by their hash")
        yield "filter", f"conversations longer than a row: {config.long}"
        yield "order", order(job, shuffle=config.shuffle)
        try:
            files = find(config.path, key="sft.path")
            wanted = self._wanted(job)
            known = ""
            if (wanted.out / FILE).is_file():
                found = open_prepared(wanted.out, key="sft.path").sides
                pieces = fitted(
                    found["train"], job.config.train.sequence, long=config.long, packing=config.packing, key="sft"
                )
                known, rows = f"; {sides(found)}", len(pieces.row_ends)
            yield "source", f"{counted(files)}{known}"
            yield "decode", "each record is a conversation"
        except ConfigError as error:
            yield "source", str(error)
        yield "pack", packed(config.packing, job, isolate=True, rows=rows)

    @hookimpl
    def example_batch(self, job: Job) -> Batch:
        from forge_train_data.loader import example

        return example(job, isolate=True)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """The run's copy of the tokenizer's files is what exports and `forge generate` read."""
        from forge_train.contract.run import writing
        from forge_train.storage import model_files
        from forge_train_data.chats import open_template, write_beside

        folder, choice = job.run.dir / model_files.FOLDER, self.config.template
        if job.dist.main and (folder / model_files.TOKENIZER).is_file():
            with writing(job.run.dir):
                template = open_template(choice, folder)
                write_beside(folder, template, job.hooks.tokenizer(), chosen=bool(choice))

    def _check_template(self, path: Path, tokenizer: Tokenizer) -> None:
        """Refuse a template that is not there, or can't end a turn, before anything is read."""
        from forge_train.storage.model_files import TOKENIZER
        from forge_train_data.chats import open_template, turn_end

        folder = path.parent if path.name == TOKENIZER else path
        if path.is_file() and folder == path:
            return  # a file of another name becomes a folder first
        try:
            turn_end(open_template(self.config.template, folder if path.exists() else None), tokenizer)
        except ConfigError as error:
            other = "" if path.exists() else " To fine-tune a model, name its folder: forge train FOLDER -p sft …"
            raise ConfigError(f"sft.template: {error}{other}") from error

    def _open(self, job: Job) -> Mapping[Side, Documents]:
        if self._sides is None:
            from forge_train_data.manifest import open_prepared
            from forge_train_data.prepare import Report, prepare

            tokenizer, wanted = job.hooks.tokenizer(), self._wanted(job)
            self._check_template(Path(wanted.tokenizer), tokenizer)
            prepare(wanted, Report(), key="sft.path", wait=True)
            prepared = open_prepared(wanted.out, key="sft.path")
            if prepared.manifest.tokenizer["digest"] != tokenizer.digest:
                raise ConfigError(
                    "sft: the run's tokenizer is not the one of its files; choose another tokenizer plugin."
                )
            self._sides = prepared.sides
        return self._sides

    def _wanted(self, job: Job) -> Preparation:
        from forge_train.storage import model_files
        from forge_train_data.prepare import Preparation, settled

        path = self.config.path
        section, key = model_files.option(job.hooks) or ("", "")
        if not section:
            raise ConfigError("sft: the run's tokenizer is of a plugin that names no files of it.")
        wanted = Preparation(
            (path,) if isinstance(path, str) else path,
            Path(),
            tokenizer=getattr(job.config.sections[section], key),
            held_out=self.config.held_out,
            chat=True,
            template=self.config.template,
            learn=self.config.learn,
        )
        return settled(wanted, self.config.cache, "sft")

"""Texts with labels as training data: a class for each text, or for each of its words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from forge_train import Batch, ConfigError, Ge, Lt, Problem, Volatile, hookimpl, section
from forge_train.contract.protocols import Loader
from forge_train_kit import hookspecs
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.data.plugin import DataPlugin, Prefetch, ahead, check_prefetch

if TYPE_CHECKING:
    from forge_train import Job
    from forge_train_kit.data.documents import Documents
    from forge_train_kit.data.held_out import Side
    from forge_train_kit.data.labels import Labels
    from forge_train_kit.data.prepare import Preparation


class TextLabels(DataPlugin):
    """Texts with labels for `classify` and `token_classify`, from any file format that Forge reads.

    For `classify`, records have a text and its label: `{"text": …, "label": …}`. For `token_classify`, they have words
    and a label for each: `{"tokens": […], "labels": […]}`. Words are joined by spaces; those with the label null or
    −100 are not learned. A label is the name of a class or its number. Texts are never split over rows, and attention
    stays inside each text. `labels`, `[batch, sequence]`, has the class at a text's last token, or at tokens of its
    words; all other positions are masked.
    """

    api = (1, 0)
    requires = ("tokenizer", "classes")
    gives: ClassVar[Mapping[str, str]] = {"build_data": "labelled_rows"}

    @section
    class Config:
        path: str | tuple[str, ...] = ""
        """Files, folders, patterns or addresses; each record has a labelled text."""
        text: str = ""
        """Field of the text, or of the list of words; empty means `text`, or `tokens`."""
        label: str = ""
        """Field of the label, or of the list of labels; empty means `label`, or `labels`."""
        align: Literal["", "first", "last", "all"] = ""
        """Tokens of a word that get its label; empty means the last, at which a causal model has read the whole
        word."""
        long: Literal["refuse", "drop", "left", "right"] = "refuse"
        """Treatment of a text longer than a row: it ends the run, is left out, or loses tokens on its left or
        right."""
        packing: Literal["best_fit", "pad"] = "best_fit"
        """Several texts in a row, or one."""
        held_out: Annotated[float, Ge(0), Lt(1)] = 0.02
        """Share of the texts that is kept for evaluation."""
        shuffle: bool = True
        """Use a different order of the rows in every epoch."""
        prefetch: Annotated[Prefetch, Volatile()] = Prefetch()
        """Reading ahead of the step, and what happens to samples that can't be read."""
        cache: Annotated[str, Volatile()] = ""
        """Folder for cached tokens; empty means forge-train/text_labels in $XDG_CACHE_HOME or ~/.cache."""

    config: Config
    _sides: Mapping[Side, Documents] | None = None

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        yield from check_prefetch(self.config.prefetch, "text_labels")
        if not self.config.path:
            yield Problem("text_labels.path", "required: your labelled texts, such as labelled.jsonl.", data=True)

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities:
        return KernelCapabilities(documents=True)

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        from forge_train_kit.data.labels import LabelledRows
        from forge_train_kit.data.stream import HELD_OUT_SEED, Ordered

        config = self.config
        rows = LabelledRows(
            self._open(job)[split],
            job.config.train.sequence,
            hookspecs.classes(job).of,
            long=config.long,
            packing=config.packing,
            key="text_labels",
            pad=hookspecs.tokenizer(job).end or 0,
        )
        if not rows.count:
            which = (
                "training"
                if split == "train"
                else "evaluation: raise text_labels.held_out, or set train.evaluate_every = 0"
            )
            raise ConfigError(f"text_labels.path: {config.path} leaves no text for {which}.")
        seed = HELD_OUT_SEED if split == "validation" else job.seed if config.shuffle else None
        return self.loader(Ordered(rows, seed, key="text_labels", fixed=split == "validation"), job, split)

    @hookimpl
    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        from forge_train_kit.data.files import find
        from forge_train_kit.data.manifest import FILE, open_prepared
        from forge_train_kit.data.stages import counted, held_out, order

        config = self.config
        yield "filter", held_out(config.held_out, "texts by their hash")
        yield "filter", f"texts longer than a row: {config.long}"
        yield "order", order(job, shuffle=config.shuffle)
        yield "pack", f"{'one text' if config.packing == 'pad' else 'several texts'} in a row; none is cut in two"
        yield from ahead(config.prefetch, job)
        try:
            labels, files, known = self._labels(job), find(config.path, key="text_labels.path"), ""
            wanted = self._wanted(job)
            if (wanted.out / FILE).is_file():
                found = open_prepared(wanted.out, key="text_labels.path").sides
                known = "; " + ", ".join(f"{one.count // 2:,} texts for {side}" for side, one in found.items())
            yield "source", f"{counted(files)}{known}"
            yield (
                "decode",
                f"text from {labels.text!r}, labels from {labels.label!r}: {len(labels.classes.names)} classes",
            )
        except ConfigError as error:
            yield "source", str(error)

    @hookimpl
    def example_batch(self, job: Job) -> Batch:
        from forge_train_kit.data.loader import example

        return example(job, isolate=True)

    def _open(self, job: Job) -> Mapping[Side, Documents]:
        if self._sides is None:
            from forge_train_kit.data.prepare.cached import obtained

            self._sides = obtained(self._wanted(job), job, "text_labels").sides
        return self._sides

    def _wanted(self, job: Job) -> Preparation:
        from forge_train_kit.data.prepare.cached import wanted_of

        config = self.config
        return wanted_of(
            job, config.path, config.cache, "text_labels", held_out=config.held_out, labels=self._labels(job)
        )

    def _labels(self, job: Job) -> Labels:
        """The record fields to read.

        Raises:
            ConfigError: for an option that has no effect on labels of texts.
        """
        from forge_train_kit.data.labels import Labels

        config, classes = self.config, hookspecs.classes(job)
        usual = ("text", "label") if classes.of == "text" else ("tokens", "labels")
        if classes.of == "text" and config.align:
            raise ConfigError("text_labels.align: has no effect on labels of whole texts; remove it.")
        return Labels(classes, config.text or usual[0], config.label or usual[1], config.align)

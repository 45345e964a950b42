"""Texts with items, such as images, as training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import Batch, ConfigError, Ge, Lt, Problem, Volatile, hookimpl, section
from forge_train.base.strict_json import dumps
from forge_train.contract.protocols import Loader
from forge_train_kit import hookspecs
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.data.plugin import DataPlugin, Prefetch, ahead, check_path, check_prefetch, item_values

if TYPE_CHECKING:
    import torch

    from forge_train import Job, Model
    from forge_train_kit.data.held_out import Side
    from forge_train_kit.data.items import ItemFields
    from forge_train_kit.data.prepare import Preparation
    from forge_train_kit.data.rows import Pieces


class Multimodal(DataPlugin):
    """Texts with items of any modality, such as images, from any file format that Forge reads.

    A record has a text, and its items under the plural of their modality: `{"text": "<image> a red circle", "images":
    ["circle.png"]}`. The text has the modality's placeholder once for each item, in their order. An item is a path,
    relative to the record's file; a `data:` URL; an address; or an object with one of these under `path` or `url`, or
    with `bytes`, as `datasets` stores images in Parquet. In tar files of WebDataset, members with the name of a `.txt`
    or `.json` are its items. Records without items are texts.

    Items are measured when the data is prepared, and decoded when their row is read; or decoded once, with `store =
    "decoded"`. Of one that can't be measured,
    `prefetch.on_error = "skip"` leaves out the record, and "replace" has the smallest item, of zeros, stand in for it.
    All text is learned, and no position of an item. An item is never split, and attention stays inside each record.
    """

    api = (1, 0)
    requires = ("tokenizer",)

    @section
    class Config:
        path: str | tuple[str, ...] = ""
        """Files, folders, patterns or addresses; each record has a text and its items."""
        field: str = "text"
        """Field of the text."""
        items: str = ""
        """Folder of relative paths of items; empty means the folder of the record's file."""
        place: Literal["", "before", "after"] = ""
        """Place of the items of a text without any placeholder: before or after it; empty refuses such a record."""
        store: Literal["references", "decoded"] = "references"
        """Content of the prepared data: places of the items' files, or the decoded items beside the tokens. These take
        more room, and a run then needs neither the files nor a decoder."""
        long: Literal["refuse", "drop", "left", "right"] = "refuse"
        """Treatment of a record longer than a row: it ends the run, is left out, or loses tokens and items on its left
        or right."""
        packing: Literal["best_fit", "pad"] = "best_fit"
        """Several records in a row, or one."""
        held_out: Annotated[float, Ge(0), Lt(1)] = 0.02
        """Share of the records that is kept for evaluation; those of the same items stay together."""
        shuffle: bool = True
        """Use a different order of the rows in every epoch."""
        prefetch: Annotated[Prefetch, Volatile()] = Prefetch()
        """Reading ahead of the step, and what happens to samples that can't be read."""
        cache: Annotated[str, Volatile()] = ""
        """Folder for cached tokens; empty means forge-train/multimodal in $XDG_CACHE_HOME or ~/.cache."""

    config: Config
    _sides: Mapping[Side, Any] | None = None
    _epoch: Pieces | None = None

    @classmethod
    def implied_values(cls, config: Any) -> Mapping[str, Any]:
        return item_values("multimodal")

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        yield from check_prefetch(self.config.prefetch, "multimodal", items=True)
        yield from check_path(self.config.path, "multimodal.path", "your records, such as captions.jsonl")

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities:
        return KernelCapabilities(documents=True)

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        from forge_train_kit.data.stream import HELD_OUT_SEED, Ordered
        from forge_train_kit.data.tokens import laid_out

        config, sequence, records = self.config, job.config.train.sequence, self._open(job)[split]
        pieces = records.fitted(sequence, long=config.long, packing=config.packing, key="multimodal")
        if split == "train":
            self._epoch = pieces
        rows = laid_out(records, sequence, pieces, packing=config.packing, pad=hookspecs.tokenizer(job).end or 0)
        if not rows.count:
            which = (
                "training"
                if split == "train"
                else "evaluation: raise multimodal.held_out, or set train.evaluate_every = 0"
            )
            raise ConfigError(f"multimodal.path: {config.path} leaves no record for {which}.")
        seed = HELD_OUT_SEED if split == "validation" else job.seed if config.shuffle else None
        return self.loader(Ordered(rows, seed, key="multimodal", fixed=split == "validation"), job, split)

    @hookimpl
    def data_stages(self, job: Job) -> Iterator[tuple[str, str]]:
        from forge_train_kit.data.files import find
        from forge_train_kit.data.manifest import FILE, open_prepared
        from forge_train_kit.data.stages import counted, held_out, order

        config = self.config
        yield "filter", held_out(config.held_out, "records by the hash of their items")
        yield "filter", f"records longer than a row: {config.long}"
        yield "order", order(job, shuffle=config.shuffle)
        yield (
            "pack",
            f"{'one record' if config.packing == 'pad' else 'several records'} in a row; no item is cut in two",
        )
        yield from ahead(config.prefetch, job)
        try:
            files, known = find(config.path, key="multimodal.path"), ""
            wanted = self._wanted(job)
            if (wanted.out / FILE).is_file():
                found = open_prepared(wanted.out, key="multimodal.path").sides
                known = "; " + ", ".join(f"{one.count // 2:,} records for {side}" for side, one in found.items())
                known += f", prepared in {wanted.out}"
            yield "source", f"{counted(files)}{known}"
            placeholders = ", ".join(one.placeholder for one in self._fields(job).modalities.values())
            kept = ", which are kept decoded" if config.store == "decoded" else ""
            yield "decode", f"text from {config.field!r}, with {placeholders} for items{kept}"
        except ConfigError as error:
            yield "source", str(error)

    @hookimpl
    def example_batch(self, job: Job) -> Batch:
        from forge_train_kit.data.items import no_items
        from forge_train_kit.data.loader import example

        return example(job, isolate=True, items=no_items(job))

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        """Say how much is learned, and store an item to try the trained model with."""
        from forge_train_kit.data.items import first_file
        from forge_train_kit.data.learned import tell_learned

        if job.dist.main and self._sides is not None and self._epoch is not None:
            tell_learned("multimodal", "records", self._sides, self._epoch, job)
            if (found := first_file(self._sides)) is not None:
                file = job.run.artifact("item.json")
                file.write_text(dumps(dict([found])), encoding="utf-8")
                job.record(file, self)

    def _open(self, job: Job) -> Mapping[Side, Any]:
        if self._sides is None:
            from forge_train_kit.data.items import opened
            from forge_train_kit.data.prepare.cached import obtained

            wanted = self._wanted(job)
            self._sides = opened(obtained(wanted, job, "multimodal").sides, wanted.items)
        return self._sides

    def _wanted(self, job: Job) -> Preparation:
        from forge_train_kit.data.prepare.cached import wanted_of

        config, fields = self.config, self._fields(job)
        return wanted_of(
            job, config.path, config.cache, "multimodal", held_out=config.held_out, field=config.field, items=fields
        )

    def _fields(self, job: Job) -> ItemFields:
        """The record fields of items.

        Raises:
            ConfigError: no plugin gives a modality.
        """
        from forge_train_kit.data.items import ItemFields

        config = self.config
        broken = config.prefetch.on_error
        decoded = config.store == "decoded"
        fields = ItemFields.of(
            job, config.path, "multimodal", config.items, broken=broken, place=config.place, decoded=decoded
        )
        if fields is None:
            raise ConfigError("multimodal: no enabled plugin gives a modality; enable one, or read texts with `text`.")
        return fields

"""A data plugin as a third party writes it, on the kit: its rows are odd."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from forge_train import Loader, Volatile, hookimpl, section
from forge_train_kit.data.plugin import DataPlugin, Prefetch
from forge_train_kit.data.stream import Ordered
from odd_rows import OddRows


class OddData(DataPlugin):
    """Rows of one token each, some of them broken."""

    api = (1, 0)

    @section
    class Config:
        broken: tuple[int, ...] = ()
        seconds: float = 0.0
        prefetch: Annotated[Prefetch, Volatile()] = Prefetch()

    @hookimpl
    def build_data(self, job: Any, split: Literal["train", "validation"]) -> Loader:
        odd = dict.fromkeys(self.config.broken, "broken")
        rows = OddRows(200, odd, seconds=self.config.seconds, size=job.config.train.sequence)
        return self.loader(Ordered(rows, None, key="odd_data"), job, split)

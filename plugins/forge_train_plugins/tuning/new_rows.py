"""Training of the rows of new tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from forge_train import Ge, Phase, Plugin, Transform, hookimpl, section

if TYPE_CHECKING:
    from forge_train import Finished, Job, Span, SpanName


class NewRows(Plugin):
    """Trains the rows of added tokens in the embedding and the head; all other rows stay as they are, to the bit.

    All other weights are frozen, unless `freeze` or `lora` says what else is trained. The optimizer's moments cover all
    rows of the two matrices.
    """

    api = (1, 0)
    facts = {"plan.per_unit": True, "hf.tunes": True, "check.example": ("new_rows.ids=[1,5]",)}

    @section
    class Config:
        ids: tuple[Annotated[int, Ge(0)], ...] = ()
        """Token ids whose rows are trained; by default, those of the tokens in `tokenizer.add` and
        `tokenizer.add_special`."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._rows: Any = None

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        from ._new_rows import Rows

        self._rows = Rows(self.config.ids, job)
        return Transform(Phase.ADAPT, "new_rows", self._rows.apply, after=("freeze", "lora"))

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        return self._rows.unchanged if span == "optimizer" else None

    @hookimpl
    def on_step(self) -> None:
        self._rows.look()

    @hookimpl
    def on_end(self, finished: Finished) -> None:
        if finished.outcome == "done":
            self._rows.warn()

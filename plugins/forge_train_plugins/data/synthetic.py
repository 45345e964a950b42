"""Random tokens as training data, for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from forge_train import Batch, ConfigError, Ge, Gt, Lt, Problem, Volatile, hookimpl, section
from forge_train.contract.protocols import Loader
from forge_train_kit import hookspecs
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.data.plugin import DataPlugin, Prefetch, check_prefetch

if TYPE_CHECKING:
    from forge_train import Job


class Synthetic(DataPlugin):
    """Random tokens, computed and not read: for measuring a run without its data.

    There is nothing to learn in them: the loss stays at ln(vocabulary).
    """

    api = (1, 0)

    @section
    class Config:
        vocabulary: Annotated[int, Ge(0), Lt(2**31)] = 0
        """Number of token ids; 0 is the tokenizer's. Not more than the model's."""
        documents: Annotated[int, Gt(0)] = 512
        """Mean length of a document in tokens."""
        isolate: bool = True
        """Keep attention inside a document; otherwise the documents are one long text."""
        prefetch: Annotated[Prefetch, Volatile()] = Prefetch()
        """Reading ahead of the step, and what becomes of samples that can't be read."""

    config: Config

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        yield from check_prefetch(self.config.prefetch, "synthetic")

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities | None:
        return KernelCapabilities(documents=True) if self.config.isolate else None

    @hookimpl
    def build_data(self, job: Job, split: Literal["train", "validation"]) -> Loader:
        from forge_train_kit.data.random_tokens import RandomTokens
        from forge_train_kit.data.stream import HELD_OUT_SEED

        vocabulary = self.config.vocabulary
        if not vocabulary:
            if not job.hooks.provider("tokenizer"):
                raise ConfigError(
                    "synthetic.vocabulary: no enabled plugin provides a tokenizer to take it from; set it."
                )
            vocabulary = hookspecs.tokenizer(job).vocabulary
        stream = RandomTokens(
            job.config.train.sequence,
            vocabulary,
            self.config.documents,
            seed=HELD_OUT_SEED if split == "validation" else job.seed,
            isolate=self.config.isolate,
            key="synthetic",
        )
        return self.loader(stream, job, split)

    @hookimpl
    def example_batch(self, job: Job) -> Batch:
        from forge_train_kit.data.loader import example

        return example(job, isolate=self.config.isolate)

"""A sample of what a model writes, at the end of its training."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import ConfigError, Finished, Ge, Gt, Le, Plugin, hookimpl, section
from forge_train.plugin import hookspecs

if TYPE_CHECKING:
    from forge_train import Job, Model

log = logging.getLogger("forge_train")


class Sample(Plugin):
    """Writes a text with the trained model when a run is done, shows it and keeps it in `artifacts/sample.txt`."""

    api = (1, 0)
    facts = {"bench.display": True}
    requires = ("tokenizer",)

    @section
    class Config:
        prompt: str = ""
        """Text to continue from; empty for the beginning of a document."""
        tokens: Annotated[int, Gt(0)] = 300
        """The most to generate."""
        temperature: Annotated[float, Ge(0)] = 0.7
        """Divides the logits; 0 takes the likeliest token."""
        top_k: Annotated[int, Ge(0)] = 0
        """Choose among that many of the likeliest tokens; 0 is all."""
        top_p: Annotated[float, Gt(0), Le(1)] = 0.95
        """Choose among the fewest likeliest tokens whose probabilities reach this sum."""
        seed: Annotated[int, Ge(0)] = 0
        """Of the random draws, which are apart from all others."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._job: Job | None = None
        self._model: Model | None = None

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        self._job, self._model = job, model

    @hookimpl
    def on_end(self, finished: Finished) -> None:
        if finished.outcome != "done" or self._job is None or self._model is None:
            return
        from forge_train_tools.generation.completion import Completion
        from forge_train_tools.generation.sampling import Sampling

        config = self.config
        sampling = Sampling(
            tokens=config.tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=config.seed,
        )
        try:
            completion = Completion(self._job, self._model, config.prompt, sampling)
        except ConfigError as error:  # the run is done and saved; only its sample is missing
            log.warning("There is no sample: %s", error)
            return
        with hookspecs.around("evaluate", self._job)():  # with the weights that evaluations see
            text = config.prompt + "".join(completion)
        if self._job.dist.main:
            file = self._job.run.artifact("sample.txt")
            file.write_text(text + "\n", encoding="utf-8")
            self._job.record(file, self)
            finished.say("A sample", text)

"""Multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

from forge_train import ConfigError, Ge, Gt, Metric, Plugin, Preparation, Problem, Tail, Task, Trunk, hookimpl, section

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from forge_train import Job, Model
    from forge_train.config import Config as RunConfig

    from ._mtp.measure import Measures


class MultiTokenPrediction(Plugin):
    """Multi-token prediction: modules behind the last layer predict the tokens after the next (arXiv:2412.19437, §2.2).

    Module k joins what the module before it gave (the first: what the model gives its head) and the embedding of the
    token k positions later, both normed, by a projection; one more layer of the model's kind and a norm follow. All
    share the model's embedding and head. The logged loss, evaluation and generation are those of the next token alone;
    `mtp.loss.k` and `mtp.accuracy.k` are logged for each module, the latter being the share of tokens that it guesses.

    A token is predicted only from its own document. A depth's summed loss is divided by the number of labels of the
    next token, so that tokens without one weigh nothing.

    The modules are the model's `tail`. To begin without them from weights that have them, set
    `train.init_unexpected = ["tail.*"]`; to add them to other weights, `train.init_missing = ["tail.*"]`.
    `forge generate --temperature 0 --drafts N` has the first N guess tokens that the model then checks at once; the
    text is the same. The layout of DeepSeek-V3 has a place for them; other exports leave them out, and say so.

    A module costs as much as a layer, a projection and another pass through the head. Under `fsdp2`, the shared
    embedding stays gathered during the step, as tied weights do.
    """

    api = (1, 0)
    requires = ("loss",)
    per_unit = True

    @section
    class Config:
        depths: Annotated[int, Gt(0)] = 1
        """Modules, one for each further token."""
        weight: Annotated[float, Ge(0)] = 0.3
        """Of the mean of their losses (λ of the paper's eq. 25, which has 0.3 at first and 0.1 at the end)."""
        chunk: Annotated[int, Ge(0)] = 0
        """Tokens whose logits exist at once; 0 chooses by vocabulary and batch."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._measures: Measures | None = None
        self._asked = False

    @hookimpl
    def tail(self, trunk: Trunk, job: Job) -> Tail:
        from ._mtp.modules import Depths

        self._asked = True
        return Depths(trunk, self.config.depths, job.step_state)

    @hookimpl
    def prepare_batch(self, job: Job) -> Preparation:
        from ._mtp.ahead import look_ahead

        return look_ahead(self.config.depths)

    @hookimpl
    def task(self, job: Job) -> Task:
        from ._mtp.task import MultiTokenTask

        mine = self.config
        return MultiTokenTask(job.hooks.loss(), mine.depths, mine.weight, mine.chunk, self._observe)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        if not self._asked:
            raise ConfigError(
                f"mtp: the model of plugin {job.hooks.provider('build_model')!r} has no place for layers behind its "
                "last one (it asks for no tail); leave mtp out, or take a model that does, such as decoder."
            )

    @hookimpl
    def metrics(self, model: Model, job: Job) -> Mapping[str, Metric]:
        from ._mtp.measure import Measures

        self._measures = Measures(self.config.depths)
        return self._measures.metrics

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        if self.config.depths >= config.train.sequence:
            yield Problem(
                "mtp.depths",
                f"no token of a sequence of {config.train.sequence} (train.sequence) has {self.config.depths} others "
                "and one to predict after it; take fewer.",
            )

    def _observe(self, seen: Tensor) -> None:
        if self._measures is not None:
            self._measures.update(seen)

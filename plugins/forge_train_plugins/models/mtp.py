"""Multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

from forge_train import ConfigError, Ge, Gt, Metric, Plugin, Preparation, Problem, Task, hookimpl, section
from forge_train_kit.heads import Tail, Trunk
from forge_train_kit.hookspecs import loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from forge_train import Job, Model
    from forge_train.config import Config as RunConfig

    from ._mtp.measure import Measures


class MultiTokenPrediction(Plugin):
    """Multi-token prediction: modules after the last layer predict the tokens after the next (arXiv:2412.19437, §2.2).

    Module k projects two normed inputs to one: the output of module k − 1 (for the first module, the hidden states that
    the model's head reads) and the embedding of the token k positions later. One more layer of the model's kind and a
    norm follow. All modules share the model's embedding and head. The logged loss, evaluation and generation use the
    next token alone. `mtp.loss.k` and `mtp.accuracy.k`, the share of tokens that module k predicts correctly, are
    logged for each module.

    A token is predicted only from its own document. A depth's summed loss is divided by the number of next-token
    labels, so that tokens without a label have no weight.

    The modules are the model's `tail`. To start without them from weights that have them, set
    `train.init_unexpected = ["tail.*"]`. To add them to other weights, set `train.init_missing = ["tail.*"]`.
    With `forge generate --drafts N`, the first N modules draft tokens and the model checks them in one pass; the
    answers are the same as without drafts. An export in DeepSeek-V3's layout contains the modules. Other exports leave
    them out and say so.

    A module costs as much as a layer, a projection and another pass through the head. Under `fsdp2`, the shared
    embedding stays gathered during the step, as tied weights do.
    """

    api = (1, 0)
    requires = ("loss",)
    facts = {"plan.per_unit": True}

    @section
    class Config:
        depths: Annotated[int, Gt(0)] = 1
        """Number of modules, one for each further token."""
        weight: Annotated[float, Ge(0)] = 0.3
        """Weight of the mean of their losses (λ in eq. 25; the paper starts with 0.3 and ends with 0.1)."""
        chunk: Annotated[int, Ge(0)] = 0
        """Number of tokens whose logits are in memory at once; 0 chooses by vocabulary and batch."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._measures: Measures | None = None
        self._asked = False

    @hookimpl
    def tail(self, trunk: Trunk, job: Job) -> Tail:
        from ._mtp.modules import Depths

        self._asked = True
        return Depths(trunk, self.config.depths, job.step)

    @hookimpl
    def prepare_batch(self, job: Job) -> Preparation:
        from ._mtp.ahead import look_ahead

        return look_ahead(self.config.depths)

    @hookimpl
    def task(self, job: Job) -> Task:
        from ._mtp.task import MultiTokenTask

        mine = self.config
        return MultiTokenTask(loss(job), mine.depths, mine.weight, mine.chunk, self._observe)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        if not self._asked:
            raise ConfigError(
                f"mtp: the model of plugin {job.hooks.provider('build_model')!r} can't have layers after its "
                "last one (it asks for no tail); disable mtp, or use a model that can, such as decoder."
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
                f"sequences of {config.train.sequence} tokens (train.sequence) are too short for {self.config.depths} "
                "depths; use fewer.",
            )

    def _observe(self, seen: Tensor) -> None:
        if self._measures is not None:
            self._measures.update(seen)

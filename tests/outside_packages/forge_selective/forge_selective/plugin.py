"""Evaluates measures of uncertainty."""

from __future__ import annotations

from forge_train import Plugin, hookimpl
from forge_train_kit.contract import Evaluator


class Selective(Plugin):
    """How well each measure of uncertainty tells wrong predictions from right ones (AUROC), on held-out text."""

    api = (1, 0)

    @hookimpl
    def uncertainty(self, job):
        """The entropy of the prediction."""
        import math

        from forge_train.plugin import hookspecs
        from forge_train_kit.model import full_tensor

        task = hookspecs.task(job)

        def entropy(part, hidden, batch):
            scores = full_tensor(task.outputs(part, hidden, batch)).float().log_softmax(-1)
            return -(scores.exp() * scores).sum(-1) / math.log(scores.shape[-1])

        return entropy

    @hookimpl
    def evaluators(self, job):
        from forge_selective.hookspecs import uncertainty
        from forge_train import MASKED
        from forge_train.plugin import hookspecs
        from forge_train_kit.metrics import AUROC
        from forge_train_kit.model import full_tensor

        task, measures = hookspecs.task(job), dict(uncertainty(job))
        metrics = {f"{name}_auroc": AUROC() for name in measures}

        def measure(part, hidden, batch):
            known = batch.labels != MASKED
            wrong = (full_tensor(task.outputs(part, hidden, batch)).argmax(-1) != batch.labels)[known]
            for name, measured in measures.items():
                metrics[f"{name}_auroc"].update(measured(part, hidden, batch)[known], wrong.long())

        return Evaluator("selective", lambda: job.hooks.build_data("validation"), measure, metrics)

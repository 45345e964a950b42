"""Classes of texts and of their tokens: heads and their tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from forge_train import Plugin, Problem, Task, hookimpl, section
from forge_train_kit.heads import Classes, Head, HeadSpec
from forge_train_kit.hookspecs import loss

if TYPE_CHECKING:
    from forge_train import Job, Metric, Model

    from ._classify import Observed


class _Classifier(Plugin):
    """The common part of both plugins: a score for each class at each position, trained at positions with a label."""

    api = (1, 0)
    requires = ("loss",)
    facts = {"plan.per_unit": True}
    name: ClassVar[str]
    of: ClassVar[Literal["text", "token"]]

    @section
    class Config:
        classes: tuple[str, ...] = ()
        """Names of the classes; label k is the k-th, from 0. An export writes them into `config.json`."""

    config: Config
    _observed: Observed | None = None

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        names, key = self.config.classes, f"{self.name}.classes"
        if len(names) < 2:
            yield Problem(
                key, f'expected the names of at least two classes, such as ["ham", "spam"]; found {len(names)}.'
            )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield Problem(key, f"{twice[0]!r} appears twice.")

    @hookimpl
    def classes(self, job: Job) -> Classes:
        return Classes(self.config.classes, self.of)

    @hookimpl
    def head(self, spec: HeadSpec, job: Job) -> Head:
        from ._classify import ClassHead

        return ClassHead(spec.dim, self.config.classes, bias=self.of == "token", std=spec.std)

    @hookimpl
    def task(self, job: Job) -> Task:
        from ._classify import Classification

        return Classification(loss(job), lambda: self._observed)

    @hookimpl
    def metrics(self, model: Model, job: Job) -> Mapping[str, Metric]:
        from ._classify import Observed

        self._observed = Observed.of(len(self.config.classes))
        return {"accuracy": self._observed.accuracy, "macro_f1": self._observed.macro_f1}


class Classify(_Classifier):
    """Sequence classification: the class of a text, from the hidden state of its last token.

    Like `…ForSequenceClassification` of transformers, it has a linear head without a bias. The loss is the mean over
    texts, which may be packed into rows. The metrics are `classify.accuracy` and `classify.macro_f1`, the mean of the
    classes' F1 scores.
    """

    name = "classify"
    of = "text"
    gives: ClassVar[Mapping[str, str]] = {"head": "text_class_logits"}
    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "head": ("text_class_logits",),
        "build_data": ("labelled_rows",),
    }

    @hookimpl
    def record_outputs(self, job: Job) -> Mapping[str, Callable[..., Mapping[str, Any]]]:
        from ._classify import class_of_record

        return {"class": partial(class_of_record, job, self.config.classes)}


class TokenClassify(_Classifier):
    """Token classification: a class for each token that has a label.

    Like `…ForTokenClassification` of transformers, it has a linear head with a bias. The loss is the mean over labelled
    tokens. The metrics are `token_classify.accuracy` and `token_classify.macro_f1`.
    """

    name = "token_classify"
    of = "token"
    gives: ClassVar[Mapping[str, str]] = {"head": "token_class_logits"}
    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "head": ("token_class_logits",),
        "build_data": ("labelled_rows",),
    }

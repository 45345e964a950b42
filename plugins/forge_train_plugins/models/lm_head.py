"""The head of language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train import Plugin, hookimpl
from forge_train_kit.heads import Head, HeadSpec

if TYPE_CHECKING:
    from forge_train import Job


class LanguageModelHead(Plugin):
    """Gives a logit for every token id, by one linear layer that may share the embedding's weights."""

    api = (1, 0)

    @hookimpl
    def head(self, spec: HeadSpec, job: Job) -> Head:
        from ._lm_head import LMHead

        return LMHead(spec)

"""The model that lm-evaluation-harness asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs

from forge_train.base.errors import ConfigError

from .asking import Answering
from .generating import Generation

TOKENS = 256
"""The most tokens of an answer, where the task does not say: as its own models have it."""
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


class HarnessModel(LM):  # type: ignore[misc] # it has no types
    """Passes requests on, on all ranks together: to the harness it is one process."""

    def __init__(self, asked: Answering) -> None:
        super().__init__()
        self._asked = asked
        self.cut = Counter[str]()
        """Number of requests of each task that lost tokens on their left."""

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        found = self._asked.log_likelihoods([one.args for one in requests])
        self._count(requests, (one.cut for one in found))
        return [(one.log_likelihood, one.greedy) for one in found]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        return [one.log_likelihood for one in self._asked.rolling([text for (text,) in (one.args for one in requests)])]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        of_task = Counter[str]()  # what else is asked changes no draw
        asked = []
        for one in requests:
            asked.append(_generation(of_task[one.task_name], *one.args))
            of_task[one.task_name] += 1
        answers = self._asked.generate(asked)
        self._count(requests, (one.cut for one in answers))
        return [one.text for one in answers]

    def _count(self, requests: Sequence[Any], cuts: Iterable[int]) -> None:
        for request, cut in zip(requests, cuts, strict=True):
            self.cut[request.task_name] += bool(cut)


def _generation(number: int, prompt: str, given: dict[str, Any]) -> Generation:
    options = normalize_gen_kwargs(given, TOKENS)
    if unknown := options.keys() - _KNOWN:
        raise ConfigError(f"generation_kwargs: {', '.join(sorted(unknown))} can't be had here; leave it out.")
    return Generation(
        prompt,
        tokens=int(options["max_gen_toks"]),
        stop=tuple(one for one in options["until"] if one),
        temperature=float(options["temperature"]) if options.get("do_sample") else 0.0,
        top_p=float(options.get("top_p") or 1.0),
        top_k=int(options.get("top_k") or 0),
        draw=(number, 0),
    )

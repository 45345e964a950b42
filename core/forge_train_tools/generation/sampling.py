"""Rules for choosing tokens: the distribution that a token is drawn from, and the draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError, nearest


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling`, as keywords."""

    tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: str | Sequence[str]
    drafts: int
    lookup: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Rule for choosing tokens. Values and their order are those of `transformers`: the penalty, the temperature, then
    top_k, top_p and min_p, each of what the one before has left.

    Args:
        tokens: the most tokens to generate.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: choose among this many of the likeliest tokens, and those that are as likely as the last of them; 0 means
            all.
        top_p: choose among the fewest likeliest tokens whose probabilities reach this sum (Holtzman et al. 2019,
            arXiv:1904.09751).
        min_p: choose among the tokens whose probability is at least this share of the likeliest one's (Nguyen et al.
            2024, arXiv:2407.01082); 0 means all.
        repetition_penalty: divides the positive logits, and multiplies the negative ones, of tokens that the prompt or
            the text has already (Keskar et al. 2019, arXiv:1909.05858); 1 means none.
        seed: of the random draws.
        stop: texts that end the generation and are not part of it.
        drafts: tokens that the modules of the model's tail draft at once, and that the model then checks in one pass;
            the text is the same. 0 disables drafts.
        lookup: the most tokens to guess at once where the text repeats itself, which the model checks in one pass; the
            text is the same. 0 disables this.

    Raises:
        ConfigError: naming every value that is out of range.
    """

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    drafts: int = 0
    lookup: int = 0

    def __post_init__(self) -> None:
        wrong = [
            f"{name}: expected {expected}, found {getattr(self, name)!r}."
            for name, fits, expected in (
                ("tokens", self.tokens >= 1, "at least 1"),
                ("temperature", 0 <= self.temperature < math.inf, "a finite number of at least 0"),
                ("top_k", self.top_k >= 0, "at least 0 (which means all)"),
                ("top_p", 0 < self.top_p <= 1, "a number greater than 0 and at most 1"),
                ("min_p", 0 <= self.min_p <= 1, "a number from 0 (which means all) to 1"),
                ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a finite number greater than 0"),
                ("seed", 0 <= self.seed < 2**63, "a number from 0 up to 2⁶³ - 1"),
                ("stop", all(self.stop), "non-empty texts"),
                ("drafts", self.drafts >= 0, "at least 0 (which means none)"),
                ("lookup", self.lookup >= 0, "at least 0 (which means none)"),
            )
            if not fits
        ]
        if wrong:
            raise ConfigError("\n".join(wrong))
        if self.drafts and self.lookup:
            raise ConfigError("drafts and lookup both guess the next tokens; leave one of them out.")


def sampling_of(options: SamplingOptions) -> Sampling:
    """The rule of some keywords; `stop` may be a single text.

    Raises:
        ConfigError: for a keyword that there is not, and as `Sampling`.
    """
    known = SamplingOptions.__annotations__
    if unknown := next((name for name in options if name not in known), ""):
        raise ConfigError(f"{unknown}: there is no such option of generation.{nearest(unknown, known)}")
    stop = options.get("stop", ())
    values: dict[str, Any] = {**options, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}
    return Sampling(**values)


def likeliest(logits: Tensor) -> int:
    """The likeliest token; of several, that with the lowest id.

    Args:
        logits: `[vocabulary]` fp32 on the CPU, without gradients. NumPy finds their largest in a seventh of the time
            that torch (2.13) takes.
    """
    return int(logits.numpy().argmax())


@dataclass(frozen=True)
class Distribution:
    """The tokens that can be drawn, and their log-probabilities.

    Args:
        ids: `[tokens]`, ascending.
        log_probabilities: `[tokens]` fp64, natural logarithms.
    """

    ids: Tensor
    log_probabilities: Tensor

    @classmethod
    def of(cls, logits: Tensor, sampling: Sampling, seen: Sequence[int]) -> Distribution:
        """The distribution of the next token.

        Args:
            logits: `[vocabulary]`, on the CPU.
            sampling: the rule; with temperature 0, one token has it all: of several likeliest, that with the lowest id.
            seen: the tokens before it.
        """
        scores = _penalised(logits.double(), sampling.repetition_penalty, seen)
        if not sampling.temperature:
            return cls(scores.argmax().view(1), torch.zeros(1, dtype=torch.float64))
        scores = (scores - scores.max()) / sampling.temperature
        ids = torch.arange(len(scores))
        if sampling.top_k and sampling.top_k < len(ids):
            ids = ids[scores >= scores.topk(sampling.top_k).values[-1]]
        if sampling.top_p < 1:
            ids = ids[_nucleus(scores[ids], sampling.top_p)]
        if sampling.min_p:
            ids = ids[scores[ids] >= math.log(sampling.min_p)]  # the likeliest one's is 0
        kept = scores if len(ids) == len(scores) else scores[ids]
        return cls(ids, kept.log_softmax(0))

    def draw(self, number: float) -> int:
        """The token at which the sum of probabilities, in the order of ids, exceeds a number from 0 up to 1."""
        sums = self.log_probabilities.exp().cumsum(0)
        place = int(torch.searchsorted(sums, number * float(sums[-1]), right=True))
        return int(self.ids[min(place, len(self.ids) - 1)])

    def log_probability(self, token: int) -> float:
        """Of a token that can be drawn."""
        return float(self.log_probabilities[torch.searchsorted(self.ids, token)])


def _penalised(scores: Tensor, penalty: float, seen: Sequence[int]) -> Tensor:
    if penalty == 1 or not seen:
        return scores
    ids = torch.tensor(sorted({one for one in seen if one < len(scores)}), dtype=torch.int64)
    scores, found = scores.clone(), scores[ids]
    scores[ids] = torch.where(found < 0, found * penalty, found / penalty)
    return scores


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Places of the fewest largest scores whose probabilities reach a sum, ascending."""
    values, order = scores.sort(descending=True, stable=True)
    probabilities = values.softmax(0)
    return order[probabilities.cumsum(0) - probabilities < top_p].sort().values

"""The choice of tokens: the processors of `transformers` as the oracle, and draws that are functions of their place."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_train_kit.data.tokenizers.byte import ByteTokenizer
from forge_train_tools.generation.draws import uniform
from forge_train_tools.generation.rows import TextRow
from forge_train_tools.generation.sampling import Distribution, Sampling

pytestmark = pytest.mark.unit

RULES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.5},
    {"top_k": 3},
    {"top_k": 1},
    {"top_k": 10_000},
    {"top_p": 0.6},
    {"top_p": 0.01},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "temperature": 2.0},
    {"temperature": 1.4, "top_k": 9, "top_p": 0.8, "min_p": 0.15, "repetition_penalty": 1.3},
    {"temperature": 0.7, "top_p": 0.7, "min_p": 0.4},
)


def by_transformers(logits: Tensor, sampling: Sampling, seen: list[int]) -> Tensor:
    """The probabilities that `model.generate(do_sample=True)` draws from, by its own list of processors."""
    from transformers import GenerationConfig, GenerationMixin

    given = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
        "repetition_penalty": sampling.repetition_penalty,
    }
    config = GenerationConfig(**given)
    host: Any = type("Host", (GenerationMixin,), {"config": SimpleNamespace(is_encoder_decoder=False)})()
    processors = host._get_logits_processor(config, input_ids_seq_length=len(seen))
    assert len(processors) == sum(
        (
            sampling.temperature != 1,
            sampling.top_k > 0,
            sampling.top_p < 1,
            sampling.min_p > 0,
            sampling.repetition_penalty != 1,
        )
    )
    found: Tensor = processors(torch.tensor([seen]), logits[None].clone())[0]
    return found.double().softmax(0)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_drawn_from_the_distribution_of_transformers(rule: dict[str, Any], seed: int) -> None:
    pytest.importorskip("transformers")
    sampling = Sampling(**({"temperature": 1.0} | rule))
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(60, generator=generator)
    if sampling.top_p == 1:  # which of equals transformers leaves out is up to its sort
        logits[7] = logits[11] = logits.max()
    seen = [3, 7, 7, int(logits.argmin()), 40]
    expected = by_transformers(logits, sampling, seen)
    found = Distribution.of(logits, sampling, seen)
    assert found.ids.tolist() == expected.nonzero()[:, 0].tolist()
    assert found.log_probabilities.exp().tolist() == pytest.approx(expected[found.ids].tolist(), rel=1e-5)
    assert all(found.log_probability(int(one)) == value for one, value in zip(*_lists(found), strict=True))


def _lists(found: Distribution) -> tuple[list[int], list[float]]:
    return found.ids.tolist(), found.log_probabilities.tolist()


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(9, dtype=torch.float64)
    before = logits.clone()
    Distribution.of(logits, Sampling(repetition_penalty=2.0), [1, 2])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6, 5e-324])
def test_the_coldest_temperatures_take_the_likeliest_token(temperature: float) -> None:
    logits = torch.tensor([1.0, 5.0, 4.999, -math.inf])
    found = Distribution.of(logits, Sampling(temperature=temperature), [])
    assert {found.draw(number) for number in (0.0, 0.5, 1 - 2**-53)} == {1}
    assert found.log_probability(1) == 0


def test_of_several_likeliest_tokens_greed_takes_the_lowest_id() -> None:
    logits = torch.zeros(5000)
    logits[[4321, 77, 78, 3000]] = 4.0
    assert Distribution.of(logits, Sampling(temperature=0), []).draw(0.9) == 77
    assert Distribution.of(logits, Sampling(temperature=0, repetition_penalty=1.1), [77]).draw(0.9) == 78


def test_of_equally_likely_tokens_the_nucleus_has_the_lowest_ids() -> None:
    logits = torch.zeros(5000)
    logits[[4321, 77, 78, 3000]] = 12.0
    assert Distribution.of(logits, Sampling(temperature=1, top_p=0.4), []).ids.tolist() == [77, 78]


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    found = Distribution.of(logits, Sampling(temperature=1), [])
    drawn = {found.draw(number) for number in (0.0, 0.4999, 0.5, 0.75, 1 - 2**-53)}
    assert drawn == {1, 3}
    assert [found.draw(0.5 - 2**-53), found.draw(0.5)] == [1, 3]


# -- draws -----------------------------------------------------------------------------------------------------------


def chi_square(observed: list[int], shares: list[float]) -> float:
    """Pearson's statistic, as the probability of one as large."""
    total = sum(observed)
    statistic = sum((have - share * total) ** 2 / (share * total) for have, share in zip(observed, shares, strict=True))
    return float(torch.special.gammaincc(torch.tensor((len(shares) - 1) / 2), torch.tensor(statistic / 2)))


PLACES = {
    "seeds": lambda at: (at, 0, 0, 5),
    "requests": lambda at: (3, at, 0, 5),
    "samples": lambda at: (3, 1, at, 5),
    "positions": lambda at: (3, 1, 0, at),
}


@pytest.mark.parametrize("place", PLACES)
def test_draws_have_the_probabilities_of_the_distribution(place: str) -> None:
    logits = torch.tensor([0.3, 2.0, -1.0, 1.2, 0.0, 1.9])
    found = Distribution.of(logits, Sampling(temperature=1.3, top_k=5), [])
    drawn = Counter(found.draw(uniform(*PLACES[place](at))) for at in range(4000))
    assert drawn.keys() == set(found.ids.tolist())
    observed = [drawn[int(one)] for one in found.ids]
    assert 1e-3 < chi_square(observed, found.log_probabilities.exp().tolist()) < 1 - 1e-3


def test_draws_of_neighbours_are_independent() -> None:
    """Pairs of places that differ by one in any number fill a table of 8 × 8 evenly."""
    for step in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
        pairs: Counter[tuple[int, int]] = Counter()
        for at in range(0, 12_800, 2):
            one = (at, at, at, at)
            other = tuple(a + b for a, b in zip(one, step, strict=True))
            pairs[int(8 * uniform(*one)), int(8 * uniform(*other))] += 1  # type: ignore[call-arg]
        observed = [pairs[a, b] for a in range(8) for b in range(8)]
        assert 1e-3 < chi_square(observed, [1 / 64] * 64) < 1 - 1e-3


def test_draws_stay_the_same_numbers() -> None:
    """A file that was begun with one version is continued by the next."""
    assert [uniform(0, 0, 0, 1), uniform(2**63 - 1, 5, 1, 4096)] == [0.1464493153210139, 0.37330487538382817]
    assert all(0 <= uniform(0, 0, 0, at) < 1 for at in range(1000))


def test_a_row_is_chosen_from_its_own_numbers_alone() -> None:
    """Neither other rows nor how often it is asked change what a row chooses."""

    def chosen(order: list[int], *, twice: bool) -> dict[int, list[int]]:
        rows = {at: row(at, tokens=6) for at in order}
        for _ in range(6):
            for at in order:
                logits = torch.randn(257, generator=torch.Generator().manual_seed(len(rows[at].ids)))
                choice = rows[at].choose(logits)
                if twice:
                    assert rows[at].choose(logits) == choice
                rows[at].add(choice)
        return {at: rows[at].ids for at in sorted(rows)}

    found = chosen([0, 1, 2], twice=False)
    assert found == chosen([2, 0, 1], twice=True)
    assert len({tuple(ids) for ids in found.values()}) == 3


def row(request: int, *, scored: bool = True, **values: Any) -> TextRow:
    sampling = Sampling(**({"temperature": 1.0, "seed": 4} | values))
    return TextRow(request, [65], sampling, ByteTokenizer(), request=(request, 0), scored=scored)


def test_log_probabilities_are_those_of_what_was_drawn_from_and_of_the_model() -> None:
    one = row(0, tokens=5, temperature=0.7, top_k=20, repetition_penalty=1.2)
    for at in range(5):
        logits = torch.randn(300, generator=torch.Generator().manual_seed(at))  # of more ids than the tokenizer has
        seen = list(one.ids)
        one.add(one.choose(logits))
        found = Distribution.of(logits[:257], Sampling(temperature=0.7, top_k=20, repetition_penalty=1.2), seen)
        choice = one.choices[-1]
        assert choice.drawn == found.log_probability(choice.id)
        assert choice.model == pytest.approx(float(logits.double().log_softmax(0)[choice.id]), rel=1e-12)
    assert one.done
    assert [choice.id for choice in one.choices] == one.ids[1:]


def test_ids_that_the_tokenizer_lacks_are_never_chosen() -> None:
    logits = torch.zeros(300)
    logits[280] = 50.0
    assert row(0, temperature=0).choose(logits).id == 0
    assert row(0).choose(logits).id < 257


@pytest.mark.parametrize("scored", [True, False])
def test_the_likeliest_token_is_the_same_without_log_probabilities(scored: bool) -> None:
    logits = torch.zeros(300)
    logits[[65, 66, 70, 280]] = torch.tensor([5.0, 4.9, 4.9, 50.0])
    assert row(0, temperature=0, scored=scored).choose(logits).id == 65
    assert row(0, temperature=0, repetition_penalty=1.1, scored=scored).choose(logits).id == 66, "65 is in the prompt"


def test_the_likeliest_token_takes_no_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums and draws take five times as long."""
    monkeypatch.delattr(Distribution, "of")
    assert row(0, temperature=0, scored=False).choose(torch.zeros(300)).id == 0

"""Rows side by side with drafts: bit for bit those without, and nothing is read of a draft that was wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from forge_train import ConfigError, Job, Model, Plugin, hookimpl
from forge_train_kit.model import PositionMemory, SlotCache, Slots
from forge_train_tools.generation.drafting import ModuleGuesser, check
from forge_train_tools.generation.drafts import Drafts
from forge_train_tools.generation.draws import uniform
from forge_train_tools.generation.sampling import Distribution, Sampling
from generation_rows import Found, Greedy, generated, requests, worst

pytestmark = pytest.mark.unit

MILD = "decoder.std=0.05"
MLA = ("mla.kv_rank=16", "mla.q_rank=24", "mla.rope_dim=4", "decoder.kv_heads=4")
MODELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "keys and values": ((), ()),
    "latents": (("mla",), MLA),
    "windows": ((), ("decoder.window=6",)),
    "windows in some layers, sinks, soft caps": (
        ("eager",),
        ("decoder.window=5", "decoder.window_layers=[true,false]", "decoder.sinks=true", "decoder.soft_cap=3"),
    ),
    "windows, a kernel called for each row": (("flex",), ("decoder.window=6",)),
    "learned positions": ((), ("decoder.positions=learned", "decoder.norm=layer", "decoder.parallel=true")),
    "experts": (("moe",), ("moe.experts=4", "moe.hidden=16")),
}
RULE = Sampling(temperature=0.9, top_k=40, repetition_penalty=1.2, seed=3)


class Drawn(Greedy):
    """Draws its tokens, with a penalty on those before."""

    def choose(self, logits: Tensor) -> Found:
        found = Distribution.of(logits, RULE, self.ids)
        return Found(found.draw(uniform(RULE.seed, self.number, 0, len(self.ids))), logits.log_softmax(0))


ROWS: dict[str, Callable[[], list[Greedy]]] = {
    "greedy": lambda: requests(9),
    "drawn": lambda: [Drawn(one.number, one.ids, one.most) for one in requests(9)],
}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Before each forward, all memory is NaN but for what its first tokens see of those that stay. Where
    columns behind a token are read with the weight 0, it is a large number instead."""
    advance = Slots.advance_by

    def poison(slots: Slots, counts: Sequence[int], known: Sequence[int]) -> None:
        for keeper in slots._keepers:
            assert isinstance(keeper, PositionMemory)
            masked = keeper.window is None and (isinstance(keeper, SlotCache) or {*counts} == {1})
            for held in keeper._held:
                stays = torch.zeros(held.shape[:2], dtype=torch.bool)
                for row, end in enumerate(known):
                    first = max(end + 1 - keeper.window, 0) if keeper.window else 0
                    turn = keeper.window + slots.extra if keeper.window else held.shape[1]
                    stays[row, [at % turn for at in range(first, end)]] = True
                held[~stays] = 1e10 if masked else math.nan
        advance(slots, counts, known)

    monkeypatch.setattr(Slots, "advance_by", poison)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def know(monkeypatch: pytest.MonkeyPatch, answers: Sequence[Greedy]) -> None:
    """Have modules of random weights guess some of the next tokens right: from none to all, by the row's length."""
    guess = ModuleGuesser._guessed

    def guessed(self: ModuleGuesser, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        found = guess(self, rows)
        for ids, some in zip(rows, found, strict=True):
            end = len(ids)
            answer = next(one.ids for one in answers if one.ids[:end] == [*ids])
            right = (7 * end + 3) % 4
            some[len(answer) - end :] = []
            some[:] = [answer[end + at] if at < right else answer[end + at] ^ 1 for at in range(len(some))]
        return found

    monkeypatch.setattr(ModuleGuesser, "_guessed", guessed)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_are_those_without_drafts(monkeypatch: pytest.MonkeyPatch, name: str, rows: str) -> None:
    plugins, values = MODELS[name]
    job, model = tiny_models.composed(MILD, "mtp.depths=3", *values, plugins=("mtp", *plugins))
    check(job, model, 3)
    plain = generated(job, model, ROWS[rows](), 3)
    know(monkeypatch, plain)
    for slots in (1, 3, 8):
        drafts = Drafts(3)
        found = generated(job, model, ROWS[rows](), slots, drafts)
        assert worst(found, plain) <= (1e-6 if name == "experts" else 0)
        assert 10 < drafts.accepted < drafts.proposed - 10


def test_guesses_do_not_depend_on_what_is_beside_or_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What modules guess does not depend on the rows beside it, on when a row began, or on how many were right."""
    job, model = tiny_models.composed(MILD, "mtp.depths=3", plugins=("mtp",))
    plain, guess = generated(job, model, requests(7), 3), ModuleGuesser._guessed
    found: dict[tuple[int, bool], dict[tuple[int, ...], list[int]]] = {}
    for slots, knowing in ((1, False), (1, True), (3, True)):
        known = found[slots, knowing] = {}

        def kept(self: ModuleGuesser, rows: Any, known: Any = known) -> list[list[int]]:
            guessed = guess(self, rows)
            known |= {tuple(ids): [*some] for ids, some in zip(rows, guessed, strict=True)}
            return guessed

        monkeypatch.setattr(ModuleGuesser, "_guessed", kept)
        if knowing:
            know(monkeypatch, plain)
        generated(job, model, requests(7), slots, Drafts(3))
    assert found[1, True] == found[3, True]
    assert len(found[1, True]) > 15
    assert found[1, True].items() <= found[1, False].items()


class Raised(Plugin):
    """Adds to what the first layer gives."""

    api = (1, 0)

    @hookimpl
    def intervene(self, model: Model, job: Job) -> dict[str, Any]:
        return {"layers.0": lambda values, positions: values + 0.1 * torch.arange(values.shape[-1])}


def test_activations_are_changed_with_drafts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = generated(*tiny_models.composed(MILD, "mtp.depths=2", plugins=("mtp",)), requests(5), 3)
    job, model = tiny_models.composed(MILD, "mtp.depths=2", plugins=("mtp", "test_drafts_side_by_side:Raised"))
    plain = generated(job, model, requests(5), 3)
    assert [one.ids for one in plain] != [one.ids for one in bare]
    know(monkeypatch, plain)
    drafts = Drafts(2)
    assert worst(generated(job, model, requests(5), 3, drafts), plain) == 0
    assert drafts.accepted > 5


def test_what_can_not_forget_is_refused() -> None:
    delta = ("decoder.layers=4", "delta_net.heads=4", "delta_net.k_heads=2", "delta_net.k_dim=6")
    job, model = tiny_models.composed(*delta, plugins=("mtp", "delta_net"))
    with pytest.raises(ConfigError, match=r"can't undo wrong drafts: RowMemory can't forget a row's newest positions"):
        check(job, model, 1)
    scaled = ("decoder.rope.scaling=dynamic", "decoder.rope.factor=4", "decoder.rope.original_sequence=16")
    job, model = tiny_models.composed(*scaled, plugins=("mtp",))
    with pytest.raises(ConfigError, match=r"can't undo wrong drafts: keys change with the length of their row\. Leave"):
        check(job, model, 1)

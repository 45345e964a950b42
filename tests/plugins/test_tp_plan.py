"""`tp`: reading a model's plan, and which gradients are parts of a sum. No process group takes part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fakes
from forge_train import ConfigError
from forge_train_plugins.parallel._tp import layers
from forge_train_plugins.parallel._tp.plan import read
from forge_train_plugins.parallel._tp.replicas import whole_parameters
from forge_train_plugins.parallel.tp import TensorParallel

pytestmark = pytest.mark.unit


def planned(extra: dict[str, Any], **values: Any) -> Any:
    """A decoder whose plan says this too."""
    part = fakes.decoder(**values)
    plan = {**part.tensor_plan(), **extra}
    part.tensor_plan = lambda: plan
    return part


def test_every_entry_is_read() -> None:
    part = fakes.decoder(qk_norm=True)
    assert {entry.name: entry.style for entry in read(part, 2)} == part.tensor_plan()


@pytest.mark.parametrize(
    ("part", "ranks", "says"),
    [
        (
            planned({"layers.0.attention.qq": "colwise"}),
            2,
            "'layers.0.attention.qq' (colwise): the model has no such module. Did you mean 'layers.0.attention.q'?",
        ),
        (
            planned({"head": "logit"}),
            2,
            "'head': there is no style 'logit'. Did you mean 'logits'? The styles are vocabulary, colwise, rowwise, ",
        ),
        (planned({"norm": "colwise"}), 2, "'norm' (colwise): expected a torch.nn.Linear, found RMSNorm."),
        (
            planned({}),
            4,
            "'layers.0.attention.k': it has 2 heads of 8 features, and every rank needs whole ones; tp (4)",
        ),
        (planned({}, heads=6, kv_heads=6, head_dim=4), 4, "it has 6 heads of 4 features"),
        (planned({}, hidden=50), 4, "'layers.0.feed_forward.gate': its 50 outputs can't be split evenly; tp (4)"),
        (planned({}, vocabulary=5, kv_heads=4), 4, "'embedding': its 5 rows in 4 pieces of 2 leave none for the last"),
        (planned({"norm": "channels"}), 3, "'norm': its 32 channels can't be split evenly; tp (3) must divide them."),
        (
            planned({"layers": "channels"}),
            2,
            "'layers' (channels): expected parameters of one length along their",
        ),
        (nn.Linear(2, 2), 2, "the model (Linear) declares no tensor_plan()"),
    ],
)
def test_what_does_not_fit_is_named_with_its_numbers(part: nn.Module, ranks: int, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(part, ranks)
    assert says in str(error.value)


def test_what_is_wrong_with_every_layer_is_said_once() -> None:
    with pytest.raises(ConfigError) as error:
        read(fakes.decoder(layers=12), 4)
    assert str(error.value).count("attention.k") == 1


def test_of_many_mistakes_six_are_told_and_the_rest_counted() -> None:
    with pytest.raises(ConfigError) as error:
        read(planned({f"{letter}": "colwise" for letter in "stuvwxyz"}), 2)
    told = str(error.value).splitlines()[1:]
    assert [line.split()[0] for line in told] == ["'s'", "'t'", "'u'", "'v'", "'w'", "'x'", "…"]
    assert told[-1].strip() == "… 2 more"


def test_features_that_are_no_heads_may_be_split_anywhere() -> None:
    part = fakes.decoder(heads=2, kv_heads=2, head_dim=16, hidden=6)
    part.layers["0"].feed_forward.head_dim = 4  # of which 6 features are no multiple
    assert read(part, 2)


def test_a_block_without_a_plan_is_named() -> None:
    part = fakes.decoder()
    part.layers["1"].feed_forward = nn.Linear(32, 32)
    with pytest.raises(ConfigError, match="Linear does not say how tensor parallelism splits it"):
        read(part, 2)


def test_a_plan_without_entries_is_refused() -> None:
    part = fakes.decoder()
    part.tensor_plan = dict
    with pytest.raises(ConfigError, match=r"the tensor_plan\(\) of \w+ names no module"):
        read(part, 2)


def partial(part: Any, *, sequence_parallel: bool) -> set[str]:
    entries = read(part, 2)
    split = {"embedding", "head", "q", "k", "v", "o", "gate", "up", "down"}
    wholes = whole_parameters(part, entries, sequence_parallel=sequence_parallel)
    return {
        one.name
        for one in wholes
        if one.partial and not (one.name.split(".")[-2] in split and one.name.endswith("weight"))
    }


def test_gradients_are_partial_where_a_rank_sees_some_tokens_or_some_heads() -> None:
    part = fakes.decoder(layers=1, qk_norm=True, bias=True, o_bias=True)
    heads = {"layers.0.attention.q_norm.weight", "layers.0.attention.k_norm.weight"}
    norms = {"norm.weight", "layers.0.attention_norm.weight", "layers.0.feed_forward_norm.weight"}
    sums = {"layers.0.attention.o.bias", "layers.0.feed_forward.down.bias"}
    assert heads | norms | sums <= partial(part, sequence_parallel=True)
    whole = partial(part, sequence_parallel=False)
    assert heads <= whole
    assert not whole & (norms | sums)


def test_async_needs_cuda() -> None:
    config = fakes.run_config()
    config.parallel, config.run = type("P", (), {"tp": 2}), type("R", (), {"device": "cpu"})
    (problem,) = fakes.make(TensorParallel, async_tp=True).check_config(config)
    assert problem.key == "tp.async_tp"
    assert "CUDA" in problem.message


def test_an_unknown_style_names_the_module_that_declares_it_and_its_plugin() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def tensor_plan(self) -> dict[str, str]:
            return {"up": "colwize"}

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def tensor_plan(self) -> dict[str, str]:
            return {f"block.{name}": style for name, style in self.block.tensor_plan().items()}

    with pytest.raises(ConfigError) as caught:
        read(Whole(), 2, lambda module: f"plugin 'mine' with {len(list(module.children()))} part")
    assert "'block.up': there is no style 'colwize'. Did you mean 'colwise'? The styles are voc" in str(caught.value)
    assert str(caught.value).endswith("It is declared by Block of plugin 'mine' with 1 part.")


def test_a_weight_that_is_sharded_already_is_a_composition_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "DTensor", nn.Parameter)
    with pytest.raises(ConfigError, match="is sharded already"):
        layers._shard(nn.Parameter(torch.ones(2)), 0, None)  # type: ignore[arg-type]

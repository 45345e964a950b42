"""Dropout of attention's weights whose masks are a function of the sample, the head and the positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_train import Batch, ConfigError, CurrentStep, PluginError
from forge_train_kit.model import AttentionDropout, DroppedWeights
from forge_train_plugins.attention.eager import Eager
from forge_train_plugins.attention.mla import MLA
from forge_train_tools.testing import RunForge

pytestmark = [pytest.mark.unit]

ROWS, LENGTH, HEADS = 4, 64, 6


def passing(first: int = 0, rows: int = ROWS, seed: int = 0) -> Any:
    """A job, a micro-batch of which passes through the model."""
    ids = torch.zeros(rows, LENGTH, dtype=torch.int64)
    batch = Batch(ids, ids, sample_ids=torch.arange(first, first + rows))
    return SimpleNamespace(seed=seed, step=CurrentStep([batch], batch))


def dropped(job: Any, rate: float = 0.5, name: str = "a", rows: int = ROWS, piece: tuple[int, int] = (0, 1)) -> Any:
    module = AttentionDropout(rate, HEADS, job, name)
    module.heads_piece = piece
    return module(torch.zeros(rows, LENGTH, 8))


def kept(job: Any, **asked: Any) -> Tensor:
    found: DroppedWeights = dropped(job, **asked)
    return found.kept(LENGTH, LENGTH)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_masks_have_their_rate_in_every_direction(rate: float) -> None:
    found = 1 - kept(passing(), rate=rate).double()
    for over in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2), (2, 3)):
        shares = found.mean(over)
        spread = (rate * (1 - rate) / (found.numel() / shares.numel())) ** 0.5
        assert (shares - rate).abs().max() < 5 * spread


def test_neighbours_know_nothing_of_each_other() -> None:
    found = kept(passing()).double() * 2 - 1
    pairs = [(dim, step) for dim, steps in enumerate(((1, 2), (1, 2), (1, 2, 16), (1, 2, 16))) for step in steps]
    for dim, step in pairs:
        one, other = found.narrow(dim, step, found.shape[dim] - step), found.narrow(dim, 0, found.shape[dim] - step)
        assert abs(float((one * other).mean())) < 5 / one.numel() ** 0.5
    diagonal = found[..., 1:, 1:] * found[..., :-1, :-1]
    assert abs(float(diagonal.mean())) < 5 / diagonal.numel() ** 0.5


@pytest.mark.parametrize("other", [{"seed": 1}, {"first": ROWS}, {"name": "b"}], ids=str)
def test_another_seed_step_or_layer_drops_others(other: dict[str, Any]) -> None:
    name = other.get("name", "a")
    changed = passing(**{key: value for key, value in other.items() if key != "name"})
    ours, others = kept(passing()), kept(changed, name=name)
    assert abs((ours == others).double().mean() - 0.5) < 5 * 0.5 / ours.numel() ** 0.5


def test_blocks_of_samples_heads_queries_and_keys_have_blocks_of_the_mask() -> None:
    whole = kept(passing(first=40))
    assert torch.equal(whole[2:], kept(passing(first=42, rows=2), rows=2))
    for at in range(3):
        assert torch.equal(whole[:, 2 * at : 2 * at + 2], kept(passing(first=40), piece=(at, 3)))
    found = dropped(passing(first=40))
    assert torch.equal(whole[..., 9:20, :], found.kept(11, LENGTH, 9))
    assert torch.equal(whole[..., 9:20, 5:], found._replace(start=5).kept(11, LENGTH - 5, 4))
    assert torch.equal(whole[..., 9:20, 30:], found._replace(start=30).kept(11, LENGTH - 30, -21))


def test_what_is_kept_is_divided_by_the_rest() -> None:
    found, weights = dropped(passing(), rate=0.2), torch.rand(ROWS, HEADS, LENGTH, LENGTH)
    torch.testing.assert_close(found(weights), weights * found.kept(LENGTH, LENGTH) / 0.8)


def test_evaluation_drops_nothing_and_needs_no_step() -> None:
    module, x = AttentionDropout(0.5, 2, SimpleNamespace(seed=0, step=CurrentStep()), "a"), torch.zeros(2, 3, 4)
    assert module.eval()(x) is None
    with pytest.raises(PluginError, match="An AttentionDropout in training does not know which samples pass"):
        module.train()(x)
    with pytest.raises(PluginError, match="given 3 sequences, but the micro-batch has 4"):
        dropped(passing(), rows=3)
    with pytest.raises(ValueError, match="AttentionDropout takes a rate of at least 0 and less than 1, found 1"):
        AttentionDropout(1.0, 2, passing(), "a")


# -- in a run ---------------------------------------------------------------------------------------------------------

DROPOUT = {"decoder.attention_dropout": 0.3}
LATENT = {"decoder.kv_heads": 0, "mla.kv_rank": 8, "mla.q_rank": 8, "mla.rope_dim": 4}


@pytest.mark.slow
@pytest.mark.parametrize("latent", [False, True])
def test_micro_batches_recomputation_and_compiled_code_change_nothing(run_forge: RunForge, latent: bool) -> None:
    attention, config = ([Eager, MLA], {**DROPOUT, **LATENT}) if latent else ([Eager], DROPOUT)
    plain = run_forge(attention, config)
    assert plain.losses != run_forge(attention, {**config, "decoder.attention_dropout": 0.0}).losses
    others = [((), {"train.micro_batch": 1}), (("ac",), {})]
    others += [] if latent else [(("compile",), {"compile.backend": "aot_eager"})]
    for plugins, more in others:
        other = run_forge([*attention, *plugins], {**config, **more})
        assert other.losses == pytest.approx(plain.losses, rel=1e-6)


def test_a_resumed_run_goes_on_with_the_masks(run_forge: RunForge) -> None:
    config = {**DROPOUT, "checkpoint.every": 2}
    through = run_forge([Eager], config, steps=4, name="through")
    run_forge([Eager], config, steps=4, stop_at=2, name="half")
    resumed = run_forge([Eager], config, steps=4, name="half")
    assert through.losses[2:] == resumed.losses[-2:]


def test_a_kernel_that_can_not_is_refused_with_the_one_that_can(run_forge: RunForge) -> None:
    with pytest.raises(ConfigError) as error:
        run_forge(config=DROPOUT)
    assert "computes attention without dropout of attention weights. Plugin 'decoder' asks for it." in str(error.value)
    assert "Installed kernels that have it: auto, eager; enable one with --plugins." in str(error.value)


def test_layers_without_weights_are_refused_only_if_all_are(run_forge: RunForge) -> None:
    sizes = {**DROPOUT, "decoder.layers": 2, "delta_net.chunk": 4}
    mixed = run_forge([Eager, "delta_net"], {**sizes, "delta_net.layers": [True, False]})
    assert mixed.finished.outcome == "done"
    with pytest.raises(ConfigError, match=r"decoder\.attention_dropout has no effect: all 2 layers have linear"):
        run_forge([Eager, "delta_net"], {**sizes, "delta_net.layers": []})

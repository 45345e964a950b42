"""Items among the tokens: against a model that is written out, and at the edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import scans
import tiny_models
from forge_train import Batch, ConfigError
from forge_train_kit.modalities import extras_of

VALUES, GRIDS, PLACES = extras_of("scan")


def batch(rows: int = 4) -> Batch:
    """Rows with 3, 0, 2 and 1 scans."""
    ids = torch.randint(20, 60, (rows, 24), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = torch.tensor([43, 40, 42, 41])[:rows]
    return scans.with_scans(Batch(ids, ids.roll(-1, 1)))


@pytest.fixture
def model() -> Any:
    return tiny_models.composed(plugins=("scans:Scans",))[1].parts[0]


def test_features_stand_at_their_places_and_tokens_at_all_others(model: Any) -> None:
    given = batch()
    seen: list[torch.Tensor] = []
    model.layers["0"].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(given.inputs, **given.model_inputs())
    places, expected = given.extras[PLACES], model.embedding(given.inputs).clone()
    counted = 0
    for row, (values, grids) in enumerate(zip(given.extras[VALUES], given.extras[GRIDS], strict=True)):
        start = 0
        for size in grids.prod(-1).tolist():
            if size:  # each item encoded alone
                features = model.fusion.enter.encoders["scan"](
                    values[None, start : start + size], torch.tensor([[[1, 1, size]]])
                )[0]
                for patch, one in enumerate(features):
                    expected[row, (places[row] == start + patch).nonzero().item()] = one
                    counted += 1
            start += size
    assert counted == int((places >= 0).sum()) > 10
    torch.testing.assert_close(seen[0], expected)


def test_padding_and_rows_beside_change_nothing(model: Any) -> None:
    given = batch()
    hidden = model(given.inputs, **given.model_inputs())
    poisoned = {**given.model_inputs(), VALUES: torch.nn.functional.pad(given.extras[VALUES], (0, 0, 0, 7))}
    for row, grids in enumerate(given.extras[GRIDS]):
        poisoned[VALUES][row, int(grids.prod(-1).sum()) :] = 1e4
    torch.testing.assert_close(model(given.inputs, **poisoned), hidden)
    for row in range(len(given.inputs)):
        alone = given.slice("batch", (row, row + 1))
        torch.testing.assert_close(model(alone.inputs, **alone.model_inputs()), hidden[row : row + 1])


def test_rows_without_items_give_the_encoder_no_gradient_and_no_nan(model: Any) -> None:
    text = batch().slice("batch", (1, 2))
    assert int(text.extras[PLACES].max()) == -1
    model(text.inputs, **text.model_inputs()).square().sum().backward()
    for name, parameter in model.fusion.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_batch_of_text_alone_needs_no_extras(model: Any) -> None:
    text = batch().slice("batch", (1, 2))
    with torch.no_grad():
        torch.testing.assert_close(model(text.inputs), model(text.inputs, **text.model_inputs()))


def test_a_model_without_a_fusion_refuses_items() -> None:
    given = batch()
    part = tiny_models.composed()[1].parts[0]
    with pytest.raises(TypeError, match="the model takes no scan_values, scan_grids, scan_places"):
        part(given.inputs, **given.model_inputs())


def test_a_fusion_without_a_modality_has_nothing_to_do(caplog: pytest.LogCaptureFixture) -> None:
    tiny_models.composed(plugins=("prefix",))
    assert "Plugin 'prefix' has nothing to do" in caplog.text


def test_two_modalities_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"both give a modality 'scan'"):
        tiny_models.composed(plugins=("scans:Scans", "scans:MoreScans"))

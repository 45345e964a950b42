"""Random tiny vision models of transformers, imported: the same features and the same gradients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import fakes
from forge_train import ConfigError
from forge_train_kit.state_map import StateMap
from forge_train_plugins.modalities._vision.families import read, write
from forge_train_plugins.modalities._vision.modality import Pictures
from forge_train_plugins.modalities._vision.patches import cut
from forge_train_plugins.modalities.vision import Image

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 20,
    "patch_size": 5,
}
CASES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "siglip": ("Siglip", {}, None),
    "siglip gelu, large eps": ("Siglip", {"hidden_act": "gelu", "layer_norm_eps": 0.1}, None),
    "clip": ("CLIP", {}, None),
    "clip gelu": ("CLIP", {"hidden_act": "gelu"}, None),
    "clip as LLaVA takes it": ("CLIP", {}, -2),
    "siglip, the last block but one": ("Siglip", {}, -2),
}


def mapped(map_: StateMap, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    plan = map_.plan({name: (tuple(one.shape), one.dtype) for name, one in given.items()})
    return dict(plan.stream(lambda name, box: given[name][tuple(slice(*bounds) for bounds in box)]))


def saved(model: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(model.config.to_dict()))
    return config


def theirs(family: str, **values: Any) -> Any:
    config = getattr(transformers, f"{family}VisionConfig")(**{**SIZES, **values})
    return fakes.initialised(getattr(transformers, f"{family}VisionModel")(config).eval()).double()


@pytest.mark.parametrize("case", CASES)
def test_features_and_gradients_are_those_of_transformers(case: str) -> None:
    family, values, layer = CASES[case]
    reference = theirs(family, **values)
    found = read(saved(reference), layer=layer)
    config = Image.Config(**found.sections["image"])
    encoder: Any = Pictures(config).encoder(8)
    ours = encoder.vision.double()
    weights = {name: p.detach() for name, p in reference.named_parameters() if not found.is_leftover(name)}
    loaded = mapped(found.map, weights)
    assert loaded.keys() == dict(ours.named_parameters()).keys()
    ours.load_state_dict(loaded)

    pictures = torch.randint(0, 256, (2, 20, 20, 3), dtype=torch.uint8)
    shape = (1, 3, 1, 1)
    mean, deviation = (torch.tensor(one, dtype=torch.float64).view(shape) for one in (config.mean, config.deviation))
    seen = (pictures.permute(0, 3, 1, 2).double() / 255 - mean) / deviation
    answer = reference(seen, output_hidden_states=True)
    expected = answer.last_hidden_state if layer is None else answer.hidden_states[layer]
    expected = expected[:, 1:] if family == "CLIP" else expected
    values_ = torch.cat([torch.from_numpy(cut(one.numpy()[None], 5, 1)) for one in pictures])[None]
    out: list[Tensor] = []
    ours.register_forward_hook(lambda module, args, features: out.append(features))
    encoder.double()(values_, torch.tensor([[[1, 4, 4], [1, 4, 4]]]))
    assert (out[0] - expected).abs().max() <= 1e-5

    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (out[0] * weight).sum().backward()
    gradients = mapped(found.map, {name: dict(reference.named_parameters())[name].grad for name in weights})
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-5, atol=1e-5)

    back = mapped(found.map.inverse(), dict(ours.named_parameters()))
    assert back.keys() == weights.keys()
    assert all(back[name].equal(one) for name, one in weights.items())


@pytest.mark.parametrize("family", ["Siglip", "CLIP"])
def test_a_description_comes_back(family: str) -> None:
    given = saved(theirs(family, hidden_act="gelu"))
    config = Image.Config(**read(given).sections["image"])
    written = write(config)
    assert {key: given[key] for key in written} == written
    again = getattr(transformers, f"{family}VisionConfig")(**written)
    assert again.hidden_size == 24
    assert read(written) == read({**written})


def test_a_prefix_stands_before_all_names() -> None:
    reference = theirs("CLIP")
    found = read(saved(reference), "vision_tower.vision_model.", -2)
    named = {f"vision_tower.vision_model.{name}": p.detach() for name, p in reference.named_parameters()}
    left = {name for name in named if found.is_leftover(name)}
    assert left == {name for name in named if "layers.2." in name or "post_layernorm" in name}
    assert "layers.1.q.weight" in mapped(found.map, {name: one for name, one in named.items() if name not in left})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"model_type": "dinov2"},
            "model_type: expected one of siglip_vision_model, clip_vision_model, found 'dinov2'",
        ),
        ({"hidden_act": "silu"}, "hidden_act: expected one of gelu, .*, found 'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout: expected 0, found 0.1"),
        ({"num_channels": 1}, "num_channels: expected 3, found 1"),
        ({"image_size": 384, "patch_size": 14}, "image_size: 384 is no multiple of patch_size = 14"),
    ],
)
def test_what_has_no_counterpart_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read({"model_type": "siglip_vision_model", **config})


def test_an_encoder_of_neither_family_is_not_written() -> None:
    with pytest.raises(ConfigError, match=r"image.fit: siglip_vision_model .* has 'square', found 'keep'"):
        write(Image.Config(fit="keep"))

"""Random tiny models of Llama 3.2 Vision of transformers: imported, asked, trained and written back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fakes
from forge_train import MASKED, Batch, ConfigError
from forge_train_kit.data.items import padded
from forge_train_kit.data.items.prompts import ItemPrompts
from forge_train_kit.hf import HFModel
from forge_train_kit.modalities import ItemSource
from forge_train_kit.state_map import Rename
from forge_train_plugins.modalities._tiles import processor
from forge_train_plugins.modalities._tiles.canvas import arranged
from forge_train_plugins.modalities._tiles.export import write
from forge_train_plugins.modalities._tiles.mllama import LANGUAGE, read
from forge_train_plugins.modalities._tiles.mllama import VISION as USUAL
from forge_train_plugins.modalities._tiles.modality import TiledPictures
from forge_train_plugins.modalities.vision import ImageTiles
from forge_train_plugins.models.decoder import Decoder
from forge_train_tools import open_model
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from hf_families import mapped

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
images = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.unit

TILES = 3
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_global_layers": 2,
    "attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "max_num_tiles": TILES,
    "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [2, 1], [3, 1]],
    "intermediate_layers_indices": [0, 2],
    "vision_output_dim": 48,
}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "cross_attention_layers": [1, 3],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "max_position_embeddings": 128,
}
WORDS = ["?", "</s>", *"abcdefgh", "<|image|>"]
IMAGE = WORDS.index("<|image|>")
PREPROCESSOR: dict[str, Any] = {
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.2, 0.3, 0.25],
    "size": {"height": 8, "width": 8},
    "max_image_tiles": TILES,
}
SIZES = {"a": (8, 8), "b": (21, 9), "c": (5, 40)}
"""Width and height of images: one tile, two in a row, and three in a column."""
PROMPTS = {"<|image|> a b c d": "b", "<|image|> e f <|image|> a b": "ca", "<|image|> <|image|> g h b": "ab"}


def reference() -> Any:
    config = transformers.MllamaConfig(vision_config=VISION, text_config=TEXT, image_token_index=IMAGE)
    model = fakes.initialised(transformers.MllamaForConditionalGeneration(config).eval())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.7 * ("gate" in name and parameter.numel() == 1)
    return model


@pytest.fixture(scope="module")
def theirs() -> Any:
    return reference()


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is published, with a tokenizer and the file for images."""
    path = tmp_path_factory.mktemp("mllama") / "folder"
    theirs.save_pretrained(path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(WORDS)}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["</s>", "<|image|>"])
    words.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    draw = torch.Generator().manual_seed(0)
    for name, (width, height) in SIZES.items():
        pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=draw)
        images.fromarray(pixels.numpy()).save(path / f"{name}.png")
    return path


@pytest.fixture(scope="module")
def opened(folder: Path) -> Any:
    return open_model(folder, plugins=["image_tiles"])


def inputs(opened: Any, folder: Path, *prompts: tuple[str, str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens and extras of prompts of one length, each with the names of its images."""
    made = ItemPrompts(opened._opened.job)
    tokens, rows = [], []
    for text, names in prompts:
        files = [str(folder / f"{name}.png") for name in names]
        ids, items = made.place(made.tokenizer.encode(text), {"image": files}, "a prompt", "/")
        tokens.append(ids)
        rows.append(items.read(len(ids)))
    return torch.tensor(tokens), {name: torch.from_numpy(one) for name, one in padded(rows).items()}


def given(folder: Path, tokens: Tensor, *names: str) -> dict[str, Any]:
    """The same as transformers' processor makes it."""
    from transformers.models.mllama import processing_mllama as processing

    made = transformers.MllamaImageProcessorPil(**PREPROCESSOR)
    rows = [[images.open(folder / f"{name}.png") for name in of_row] for of_row in names]
    found = made([row for row in rows if row], return_tensors="pt")
    sparse = [processing.get_cross_attention_token_mask(row, IMAGE) for row in tokens.tolist()]
    counts = iter(found.pop("num_tiles"))
    tiles = [next(counts) if row else [] for row in rows]
    mask = processing.convert_sparse_cross_attention_mask_to_dense(sparse, tiles, TILES, tokens.shape[1])
    for name in list(found):  # rows without an image
        full = found[name].new_zeros(len(rows), *found[name].shape[1:])
        full[[at for at, row in enumerate(rows) if row]] = found[name]
        found[name] = full
    found["aspect_ratio_mask"][:, :, 0] = 1
    return {"input_ids": tokens, **found, "cross_attention_mask": torch.from_numpy(mask)}


def compared(opened: Any, theirs: Any, ours: Any, expected: Any) -> None:
    """Logits and the gradients of all parameters."""
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    module = opened.module
    for model, logits in ((module, ours), (theirs, expected)):
        model.zero_grad()
        logits.square().mean().backward()
    config = {**json.loads(json.dumps(theirs.config.to_dict())), "architectures": [type(theirs).__name__]}
    around = read(config, PREPROCESSOR)
    assert around is not None
    inner = fakes.make(Decoder).import_hf(around.config)
    assert inner is not None
    found = {name: one.grad if one.grad is not None else one * 0 for name, one in theirs.named_parameters()}
    gradients = mapped(around.whole(inner), found)
    for name, parameter in module.named_parameters():
        mine = parameter.grad if parameter.grad is not None else parameter * 0
        torch.testing.assert_close(
            mine, gradients.pop(name), rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert not gradients


@pytest.mark.parametrize("text", PROMPTS)
def test_logits_gradients_and_texts_are_those_of_transformers(
    text: str, opened: Any, theirs: Any, folder: Path
) -> None:
    names = PROMPTS[text]
    tokens, extras = inputs(opened, folder, (text, names))
    asked = given(folder, tokens, names)
    compared(opened, theirs, opened.module.head(opened.module(tokens, **extras)), theirs(**asked).logits)
    written = theirs.generate(**asked, max_new_tokens=8, do_sample=False, eos_token_id=1, pad_token_id=0)
    files = [str(folder / f"{name}.png") for name in names]
    shown = opened.generate(text, items={"image": files}, tokens=8, temperature=0)
    new = written[0, tokens.shape[1] :].tolist()
    assert new
    assert shown.split() == [WORDS[one] for one in new if one != 1]


def test_a_text_without_an_image_is_that_of_transformers(opened: Any, theirs: Any) -> None:
    tokens = torch.tensor([[2, 5, 3, 9, 4]])
    compared(opened, theirs, opened.module.head(opened.module(tokens)), theirs(input_ids=tokens).logits)


def test_tokens_without_an_image_before_them_take_nothing_from_others(opened: Any, theirs: Any, folder: Path) -> None:
    """Meta's own code multiplies by `full_text_row_masked_out_mask` after attention too; transformers leaves it out."""
    rows = ("a b <|image|> c d", "b"), ("e f g h a", ""), ("<|image|> a <|image|> c c", "bc")
    tokens, extras = inputs(opened, folder, *rows)
    asked = given(folder, tokens, *(names for _, names in rows))
    seen: dict[str, Tensor] = {}
    hooks = []
    for index in TEXT["cross_attention_layers"]:
        layer = theirs.model.language_model.layers[index]
        hooks.append(
            layer.register_forward_pre_hook(
                lambda _, args, more: seen.update(rows=more["full_text_row_masked_out_mask"][:, 0]), with_kwargs=True
            )
        )
        hooks.append(layer.cross_attn.register_forward_hook(lambda _, args, out: (out[0] * seen["rows"], out[1])))
    ours = opened.module.head(opened.module(tokens, **extras))
    try:
        compared(opened, theirs, ours, theirs(**asked).logits)
    finally:
        for hook in hooks:
            hook.remove()
    alone = theirs(input_ids=tokens[1:2]).logits
    torch.testing.assert_close(ours[1:2], alone, rtol=1e-5, atol=1e-5)


def test_a_text_that_would_teach_a_placeholder_is_refused(opened: Any) -> None:
    job = opened._opened.job
    tokens = torch.tensor([[2, IMAGE, 3, 4]])
    masked = Batch(tokens, torch.tensor([[MASKED, 3, 4, MASKED]]))
    assert job.hooks.prepare_batch()([masked], 0)[0].labels is masked.labels
    with pytest.raises(ConfigError, match=f"the data has the token {IMAGE} to learn, which stands for an item"):
        job.hooks.prepare_batch()([Batch(tokens, torch.tensor([[IMAGE, 3, 4, MASKED]]))], 0)


def test_an_export_is_read_by_transformers(folder: Path, theirs: Any, tmp_path: Path) -> None:
    import_checkpoint(folder, tmp_path / "imported", plugins=("image_tiles",))
    export_checkpoint(tmp_path / "imported", tmp_path / "exported")
    again, told = transformers.MllamaForConditionalGeneration.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    kept = dict(again.named_parameters())
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, kept.pop(name)), name
    assert not kept
    tokens = torch.tensor([[IMAGE, 2, 3, 4]])
    asked = given(folder, tokens, "b")
    assert torch.equal(again.eval()(**asked).logits, theirs(**asked).logits)
    for part in ("vision_config", "text_config"):
        before, after = (getattr(one.config, part).to_dict() for one in (theirs, again))
        changed = {key for key, value in before.items() if after[key] != value}
        assert changed <= {"bos_token_id", "dtype", "_name_or_path", "rope_parameters"}, part
    assert (tmp_path / "exported" / "preprocessor_config.json").read_text() == json.dumps(PREPROCESSOR)


@pytest.mark.parametrize(
    "size", [(8, 8), (1, 1), (9, 8), (16, 15), (17, 17), (3, 40), (200, 3), (24, 8), (25, 60), (333, 211), (7, 23)]
)
def test_tiles_are_those_of_transformers(size: tuple[int, int], tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8, generator=draw)
    images.fromarray(pixels.numpy()).save(tmp_path / "it.png")
    theirs = transformers.MllamaImageProcessorPil(size={"height": 8, "width": 8}, max_image_tiles=4, do_normalize=False)
    found = theirs(images.open(tmp_path / "it.png"), do_rescale=False, return_tensors="pt")
    (count,) = found["num_tiles"][0]
    expected = found["pixel_values"][0, 0, :count].permute(0, 2, 3, 1)
    ours = TiledPictures(ImageTiles.Config(size=8, patch=4, tiles=4))
    source = ItemSource(str(tmp_path / "it.png"), "a record")
    item = ours.read(source)
    assert item.grid == ours.measure(source)
    assert ours.positions(item.grid) == count * 5
    tiles = torch.from_numpy(item.values).view(count, 2, 2, 4, 4, 3).transpose(2, 3).reshape(count, 8, 8, 3)
    assert torch.equal(tiles.float(), expected)
    rows, columns = arranged(*size, 8, 4)
    kinds = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
    kind = kinds.index([rows, columns]) + 1
    assert found["aspect_ratio_ids"].item() == kind
    encoder: Any = ours.encoder(16)
    assert encoder._kinds(torch.tensor([[item.grid, (0, 0, 0)]])).tolist() == [[kind, 0]]


def test_operations_are_those_that_torch_counts() -> None:
    options = {"size": 8, "patch": 4, "dim": 16, "heads": 2, "layers": 2, "outputs": (1,)}
    modality = TiledPictures(ImageTiles.Config(**options))
    example = modality.example()
    assert (example.grid, example.values.shape) == ((1, 2, 8), (16, 48))
    assert modality.smallest() == (1, 2, 2)
    encoder: Any = fakes.initialised(modality.encoder(24))
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        vectors = encoder(torch.from_numpy(example.values)[None], torch.tensor([[example.grid]]))
    assert vectors.shape[1] == modality.positions(example.grid) == encoder.vectors(torch.tensor([example.grid])).item()
    assert encoder.flops(16) == counted.get_total_flops()
    assert encoder.step_flops(16) == 3 * encoder.flops(16)
    encoder.vision.requires_grad_(False)
    assert encoder.step_flops(16) == 3 * encoder.flops(16) - 2 * encoder.vision.flops(16)
    encoder.requires_grad_(False)
    assert encoder.step_flops(16) == encoder.flops(16)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"text_config": {**TEXT, "cross_attention_layers": [1, 2]}}, "no two of them side by side, found .1, 2."),
        ({"text_config": {**TEXT, "cross_attention_layers": [4]}}, "expected layers of 0 to 3"),
        ({"text_config": {**TEXT, "cross_attention_layers": []}}, "expected at least one layer"),
        ({"text_config": {**TEXT, "tie_word_embeddings": True}}, "tie_word_embeddings: expected False, found True"),
        ({"vision_config": {**VISION, "num_channels": 1}}, "num_channels: expected 3, found 1"),
        ({"vision_config": {**VISION, "vision_output_dim": 32}}, "vision_output_dim: expected 48, found 32"),
        ({"vision_config": {**VISION, "hidden_act": "silu"}}, "hidden_act: expected one of gelu, .* found 'silu'"),
        ({"vision_config": {**VISION, "max_num_tiles": 2}}, r"supported_aspect_ratios: expected \[\[1, 1\], \[1, 2\]"),
    ],
)
def test_a_model_without_counterpart_is_refused(changed: dict[str, Any], says: str) -> None:
    config = {"architectures": ["MllamaForConditionalGeneration"], "vision_config": VISION, "text_config": TEXT}
    assert read(config, {}) is not None
    assert read({**config, "architectures": ["LlamaForCausalLM"]}, {}) is None
    with pytest.raises(ConfigError, match=says):
        read({**config, **changed}, {})


def test_what_a_description_leaves_out_is_as_in_transformers() -> None:
    for kind, usual in (("mllama_vision_model", USUAL), ("mllama_text_model", LANGUAGE)):
        described = transformers.AutoConfig.for_model(kind).to_dict()
        assert {key: described[key] for key in usual} == usual
    found = read({"architectures": ["MllamaForConditionalGeneration"]}, {})
    assert found is not None
    assert found.model.sections["cross_attention"] == {"layers": [3, 7, 11, 15, 19, 23, 27, 31], "attend": "run"}
    inner = fakes.make(Decoder).import_hf(found.config)
    assert inner is not None
    assert (inner.sections["decoder"]["layers"], inner.sections["decoder"]["placeholders"]) == (32, 8)


def test_every_tensor_of_llama_3_2_11b_vision_has_its_place() -> None:
    with torch.device("meta"):
        config = transformers.MllamaConfig(vision_config={"image_size": 560})
        published = transformers.MllamaForConditionalGeneration(config)
    found = read({**config.to_dict(), "architectures": ["MllamaForConditionalGeneration"]}, {})
    assert found is not None
    inner = fakes.make(Decoder).import_hf(found.config)
    assert inner is not None
    whole = found.whole(inner)
    described = {name: (tuple(one.shape), one.dtype) for name, one in published.named_parameters()}
    fitting = max((whole.map, *whole.others), key=lambda one: len(one.trace(described).taken))
    step = fitting.trace(described)
    assert not step.left
    assert not step.wrong
    assert sum(one.numel() for one in published.parameters()) == 10_670_220_835


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"do_pad": False}, "do_pad: expected True"),
        ({"resample": 3}, "resample: expected 2"),
        ({"max_image_tiles": 4}, "max_image_tiles: expected 3, found 4"),
        ({"size": {"height": 16, "width": 16}}, "size: expected {'height': 8, 'width': 8}"),
        ({"rescale_factor": 1.0}, "rescale_factor: expected 1/255"),
    ],
)
def test_a_file_for_images_without_counterpart_is_refused(changed: dict[str, Any], says: str) -> None:
    options = {"size": 8, "tiles": TILES}
    assert processor.read({"image_processor": PREPROCESSOR}, options)["mean"] == [0.4, 0.5, 0.6]
    with pytest.raises(ConfigError, match=says):
        processor.read({**PREPROCESSOR, **changed}, options)


@pytest.mark.parametrize(
    ("architecture", "fusion", "attend", "says"),
    [
        ("Llama", "cross_attention", "run", "has a MllamaForCausalLM, found LlamaForCausalLM; .*placeholders = 8"),
        ("Mllama", "prefix", "run", "layers that attend to images; plugin 'prefix' joins them"),
        ("Mllama", "cross_attention", "all", "cross_attention.attend: .* has 'run', found 'all'"),
        ("Mllama", "cross_attention", "run", "needs a token for <|image|>, which this run's tokenizer lacks"),
    ],
)
def test_a_model_that_it_is_not_is_not_written(architecture: str, fusion: str, attend: str, says: str) -> None:
    section = SimpleNamespace(attend=attend, layers=(1,), every=4)
    hooks = SimpleNamespace(provider=lambda slot: fusion if slot == "fusion" else None)
    job: Any = SimpleNamespace(hooks=hooks, config=SimpleNamespace(sections={"cross_attention": section}))
    config = ImageTiles.Config()
    layout = HFModel(Rename({}), config={"architectures": [f"{architecture}ForCausalLM"], "num_hidden_layers": 4})
    with pytest.raises(ConfigError, match=says.replace("|", r"\|")):
        write(config, TiledPictures(config), layout, job)

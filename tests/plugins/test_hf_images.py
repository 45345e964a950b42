"""Classes of transformers that read images: logits, gradients and texts are those of the class run by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_images
from crossed import marked
from forge_train import ConfigError
from forge_train_kit.data.items import ItemPrompts, padded
from forge_train_plugins.modalities._processed.processor import Processor
from forge_train_tools import open_model
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
images = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.unit


def processed(folder: Path, kind: str, text: str, files: Sequence[Path]) -> dict[str, Any]:
    """What the class's own processor makes of a text and its pictures."""
    pictures = [images.open(file) for file in files]
    if kind not in (*hf_images.QWEN, "internvl"):
        found: Any = transformers.AutoProcessor.from_pretrained(folder)(
            images=pictures, text=[text], return_tensors="pt"
        )
        return {key: one for key, one in found.items() if key != "attention_mask"}
    # The library makes these only where torchvision is installed, for their videos.
    seen: Any = transformers.AutoImageProcessor.from_pretrained(folder)(images=pictures, return_tensors="pt")
    image, known = hf_images.SPECIAL[kind][0], hf_images.words(kind)
    tiles = seen.pop("num_patches", None)
    counts = seen["image_grid_thw"].prod(-1) // 4 if tiles is None else torch.as_tensor(tiles) * 4
    for count in counts.tolist():
        several = ["<pad>"] * count
        text = text.replace(image, " ".join(several if tiles is None else ["<img>", *several, "</img>"]), 1)
    ids = torch.tensor([[known.index(word) for word in text.replace("<pad>", image).split()]])
    kinds = {} if tiles is not None else {"mm_token_type_ids": (ids == known.index(image)).int()}
    return {"input_ids": ids, **kinds, **seen}


def placed(opened: Any, files: Sequence[Path], text: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Token ids, and the extras of a batch."""
    prompts = ItemPrompts(opened._opened.job)
    ids, items = prompts.place(prompts.tokenizer.encode(text), {"image": list(files)}, "a prompt", "/")
    extras = {name: torch.from_numpy(one) for name, one in padded([items.read(len(ids))]).items()}
    return torch.tensor([ids]), extras


@pytest.mark.slow
@pytest.mark.parametrize("kind", hf_images.KINDS)
def test_logits_and_gradients_are_those_of_the_class(kind: str, tmp_path: Path) -> None:
    theirs = hf_images.reference(kind)
    folder = hf_images.saved(tmp_path / "folder", kind, theirs)
    opened = open_model(folder, plugins=["hf", "hf_images"])
    # In fp32, the bias of keys has a gradient of rounding alone.
    module: Any = opened.module.double()
    theirs.double()
    for text, names in zip(hf_images.prompts(kind), ("b", "ca"), strict=True):
        files = [folder / f"{name}.png" for name in names]
        given = processed(folder, kind, text, files)
        tokens, extras = placed(opened, files, text)
        assert tokens.equal(given["input_ids"])
        ours, expected = module.head(module(tokens, **extras)), theirs(**given).logits
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        for model, logits in ((module, ours), (theirs, expected)):
            model.zero_grad()
            torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
        others = {name: one.grad for name, one in theirs.named_parameters() if one.grad is not None}
        mine = {name.removeprefix("head."): one.grad for name, one in module.named_parameters() if one.grad is not None}
        assert mine.keys() == others.keys()
        for name, gradient in mine.items():
            error = (gradient - others[name]).norm() / others[name].norm().clamp_min(1e-3)
            assert error <= 1e-5, f"{name}: {error:.1e}"


LESS = marked(list(hf_images.KINDS), ["llava", "internvl", "qwen2_vl", "qwen3_vl"])
"""CI has one class with tiles, and one that counts positions along three axes."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", LESS)
def test_texts_are_those_of_the_class_also_after_an_export(kind: str, tmp_path: Path) -> None:
    theirs = hf_images.reference(kind).eval()
    folder = hf_images.saved(tmp_path / "folder", kind, theirs)
    import_checkpoint(folder, tmp_path / "imported", plugins=("hf", "hf_images"))
    export_checkpoint(tmp_path / "imported", tmp_path / "exported")
    again: Any = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "exported").eval()
    stored = again.state_dict()
    assert all(one.equal(stored[name]) for name, one in theirs.state_dict().items())
    opened = open_model(tmp_path / "imported")
    for text, names in zip(hf_images.prompts(kind), ("b", "ca"), strict=True):
        files = [folder / f"{name}.png" for name in names]
        given = processed(tmp_path / "exported", kind, text, files)
        written = again.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=1, pad_token_id=0)
        shown = opened.generate(text, items={"image": [str(one) for one in files]}, tokens=8, temperature=0)
        known = hf_images.words(kind)
        new = [known[one] for one in written[0, given["input_ids"].shape[1] :].tolist()]
        assert new
        assert shown.split() == [one for one in new if one not in ("?", "</s>", *hf_images.SPECIAL[kind])]


@pytest.mark.parametrize("kind", LESS)
def test_documents_of_a_row_are_read_as_if_alone(kind: str, tmp_path: Path) -> None:
    folder = hf_images.saved(tmp_path / "folder", kind)
    opened = open_model(folder, plugins=["hf", "hf_images"])
    module: Any = opened.module
    parts = [
        placed(opened, [folder / f"{name}.png" for name in names], text)
        for text, names in zip(hf_images.prompts(kind), ("b", "ca"), strict=True)
    ]
    alone = torch.cat([module(tokens, **extras) for tokens, extras in parts], 1)
    tokens = torch.cat([one for one, _ in parts], 1)
    lengths = [one.shape[1] for one, _ in parts]
    values, grids = (torch.cat([extras[f"image_{name}"] for _, extras in parts], 1) for name in ("values", "grids"))
    first, second = (extras["image_places"] for _, extras in parts)
    places = torch.cat([first, torch.where(second < 0, second, second + first.max() + 1)], 1)
    # A row of text, whose items are padding, stands above.
    text = torch.full_like(tokens, 3)
    documents = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))[None]
    spans = torch.cat([torch.arange(length) for length in lengths])[None]
    together = module(
        torch.cat([text, tokens]),
        position_ids=spans.expand(2, -1),
        document_ids=documents.expand(2, -1),
        image_values=torch.cat([torch.full_like(values, torch.nan), values]),
        image_grids=torch.cat([torch.zeros_like(grids), grids]),
        image_places=torch.cat([torch.full_like(places, -1), places]),
    )
    torch.testing.assert_close(together[1:], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LESS)
def test_a_batch_without_images_runs_the_encoder(kind: str, tmp_path: Path) -> None:
    """Each rank gathers its weights, whichever has an image."""
    folder = hf_images.saved(tmp_path / "folder", kind)
    opened = open_model(folder, plugins=["hf", "hf_images"])
    module: Any = opened.module
    tokens, extras = placed(opened, [], "a b c d")
    with_none, plain = module(tokens, **extras), module(tokens)
    assert with_none.equal(plain)
    with_none.sum().backward()
    inside = [one.grad for name, one in module.named_parameters() if "vis" in name and "post_layernorm" not in name]
    assert len(inside) > 10
    assert all(one is not None for one in inside[:10])
    assert not any(one.any() for one in inside if one is not None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vision_config.attention_dropout": 0.1}, r"off: hf\.set\.vision_config\.attention_dropout = 0\.0"),
        (
            {"image_token_id": 3},
            r"looks for the token 3 at .* and the tokenizer has 10 for <image>; take both from one",
        ),
    ],
)
def test_a_class_that_does_not_fit_is_told(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = hf_images.saved(tmp_path / "folder", "llava")
    values = {f"hf.set.{key}": value for key, value in changes.items()}
    with pytest.raises(ConfigError, match=says):
        open_model(folder, plugins=["hf", "hf_images"], set=values)


@pytest.mark.parametrize(
    ("removed", "described", "says"),
    [
        ("preprocessor_config.json", {}, r"/folder has no preprocessor_config\.json; copy it from the published model"),
        ("config.json", {"processor_class": None}, "no file in .*/folder describes a processor of transformers"),
        ("", {"patch_size": None}, "the processor in .*/folder can't be used: TypeError"),
    ],
)
def test_a_processor_that_does_not_fit_is_told(
    removed: str, described: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = hf_images.saved(tmp_path / "folder", "llava")
    file = folder / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | described))
    if removed:
        (folder / removed).unlink()
    with pytest.raises(ConfigError, match=says):
        Processor(str(folder))


def test_what_a_processor_gives_beside_pixels_is_named(tmp_path: Path) -> None:
    folder = hf_images.saved(tmp_path / "folder", "llava")
    sizes = {
        "size": {"shortest_edge": 20},
        "crop_size": {"height": 20, "width": 20},
        "image_grid_pinpoints": [[20, 40]],
    }
    transformers.LlavaNextImageProcessorPil(**sizes).save_pretrained(folder)
    file = folder / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"processor_class": "LlavaNextProcessor"}))
    with pytest.raises(ConfigError, match="LlavaNextProcessor of transformers gives image_sizes beside pixels"):
        Processor(str(folder))


@pytest.mark.slow
def test_pixels_have_the_dtype_that_the_run_computes_in(tmp_path: Path) -> None:
    """Idefics3 casts them to that of its first weight, which a run keeps in fp32."""
    folder = hf_images.saved(tmp_path / "folder", "idefics3")
    exact, narrow = (
        open_model(folder, plugins=["hf", "hf_images"], set={"train.precision": one}) for one in ("fp32", "bf16")
    )
    tokens, extras = placed(exact, [folder / "c.png"], hf_images.prompts("idefics3")[0])
    found, wanted = (one.module(tokens, **extras).float() for one in (narrow, exact))
    assert 0 < (found - wanted).norm() / wanted.norm() < 0.05

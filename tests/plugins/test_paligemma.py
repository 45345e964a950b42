"""Random tiny PaliGemma models of transformers: imported, asked, trained and written back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fakes
import tiny_models
from forge_train import MASKED, ConfigError
from forge_train.engine import train
from forge_train_kit import hookspecs
from forge_train_kit.data.items import padded
from forge_train_kit.data.items.prompts import ItemPrompts
from forge_train_kit.hf import HFModel
from forge_train_kit.state_map import Rename
from forge_train_plugins.modalities._vision.modality import Pictures
from forge_train_plugins.modalities._vision.paligemma import MISSING, read, write
from forge_train_plugins.modalities.vision import Image
from forge_train_plugins.models.decoder import Decoder
from forge_train_tools import open_model
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.imported import imported
from test_llava import TEXT, VISION, WORDS, saved, seen

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

GEMMA2 = {"query_pre_attn_scalar": 8, "sliding_window": 6, "attn_logit_softcapping": 3.0}
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "1": ("Gemma", {}, ()),
    "2": ("Gemma2", GEMMA2, ("eager",)),
}
PROMPTS = {"a b <image> c d": "a", "<image> e <image> f a b": "ba"}


def reference(text: str, more: dict[str, Any]) -> Any:
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=getattr(transformers, f"{text}Config")(**TEXT, head_dim=8, **more),
        image_token_index=WORDS.index("<image>"),
        projection_dim=TEXT["hidden_size"],
        hidden_size=TEXT["hidden_size"],
        vocab_size=len(WORDS),
    )
    config._attn_implementation = "eager"
    model = fakes.initialised(transformers.PaliGemmaForConditionalGeneration(config).eval())
    with torch.no_grad():  # the language model's norms multiply by 1 + weight
        for name, parameter in model.named_parameters():
            parameter -= float("language_model" in name and "norm" in name)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_texts_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    text, more, plugins = CASES[case]
    theirs = reference(text, more)
    folder = saved(tmp_path / "folder", theirs)
    import_checkpoint(folder, tmp_path / "imported", plugins=("image", *plugins))
    opened = open_model(tmp_path / "imported")
    agree(opened, theirs, folder)

    export_checkpoint(tmp_path / "imported", tmp_path / "exported")
    again, told = transformers.PaliGemmaForConditionalGeneration.from_pretrained(
        tmp_path / "exported", output_loading_info=True, attn_implementation="eager"
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    agree(opened, again.eval(), folder)


def agree(opened: Any, theirs: Any, folder: Path) -> None:
    """Logits and gradients with an answer after the prompt, and what is generated."""
    job, module = opened._opened.job, opened.module
    prompts = ItemPrompts(job)
    for text, names in PROMPTS.items():
        files = [str(folder / f"{name}.png") for name in names]
        ids, items = prompts.place(prompts.tokenizer.encode(text), {"image": files}, "a prompt", "/")
        answer = [WORDS.index(one) for one in "hcabd"]
        tokens = torch.tensor([ids + answer])
        labels = torch.cat((torch.full((1, len(ids) - 1), MASKED), torch.tensor([[*answer, MASKED]])), 1)
        extras = {name: torch.from_numpy(one) for name, one in padded([items.read(tokens.shape[1])]).items()}
        ends = (torch.arange(tokens.shape[1]) < len(ids))[None] * len(ids)
        ours = module.head(module(tokens, prefix_ends=ends, **extras))
        given = {"input_ids": tokens, "pixel_values": seen(folder, names), "token_type_ids": (ends == 0).long()}
        expected = theirs(**given).logits
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        for model, logits in ((module, ours), (theirs, expected)):
            model.zero_grad()
            torch.nn.functional.cross_entropy(logits[0], labels[0]).backward()
        pairs = {
            "embedding.weight": "model.language_model.embed_tokens.weight",
            "layers.1.attention.o.weight": "model.language_model.layers.1.self_attn.o_proj.weight",
            "layers.0.attention_norm.weight": "model.language_model.layers.0.input_layernorm.weight",
            "norm.weight": "model.language_model.norm.weight",
            "fusion.enter.encoders.image.connector.first.weight": "model.multi_modal_projector.linear.weight",
            "fusion.enter.encoders.image.vision.layers.0.q.weight": (
                "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight"
            ),
        }
        mine, others = (dict(one.named_parameters()) for one in (module, theirs))
        for name, other in pairs.items():
            torch.testing.assert_close(mine[name].grad, others[other].grad, rtol=1e-5, atol=1e-5)
        prompt = {**given, "input_ids": tokens[:, : len(ids)], "token_type_ids": torch.zeros(1, len(ids)).long()}
        written = theirs.generate(**prompt, max_new_tokens=8, do_sample=False, eos_token_id=1, pad_token_id=0)
        shown = opened.generate(text, items={"image": files}, tokens=8, temperature=0)
        new = written[0, len(ids) :].tolist()
        assert new
        assert shown.split() == [WORDS[one] for one in new if WORDS[one] not in ("</s>", "<image>")]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"vision_config": {"model_type": "clip_vision_model"}}, "vision_config: model_type: expected siglip_vision"),
        ({"text_config": {"model_type": "llama"}}, "text_config: model_type: expected one of gemma, gemma2, .*'llama'"),
        ({"projection_dim": 64}, "projection_dim: expected 32, as text_config has, found 64"),
        ({"text_config": {"use_bidirectional_attention": False}}, "use_bidirectional_attention: expected true"),
    ],
)
def test_a_model_without_counterpart_is_refused(changed: dict[str, Any], says: str) -> None:
    config = json.loads(json.dumps(reference("Gemma", {}).config.to_dict()))
    config["architectures"] = ["PaliGemmaForConditionalGeneration"]
    found = read(config, {})
    assert found is not None
    assert found.config["use_bidirectional_attention"] == "prefix"
    with pytest.raises(ConfigError, match=says):
        read({**config, **changed}, {})


PUBLISHED = {
    "architectures": ["PaliGemmaForConditionalGeneration"],
    "bos_token_id": 2,
    "eos_token_id": 1,
    "hidden_size": 2048,
    "ignore_index": -100,
    "image_token_index": 257152,
    "model_type": "paligemma",
    "pad_token_id": 0,
    "projection_dim": 2048,
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "model_type": "gemma",
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_image_tokens": 256,
        "num_key_value_heads": 1,
        "torch_dtype": "float32",
        "vocab_size": 257216,
    },
    "torch_dtype": "float32",
    "transformers_version": "4.41.0.dev0",
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_image_tokens": 256,
        "patch_size": 14,
        "projection_dim": 2048,
        "projector_hidden_act": "gelu_fast",
        "vision_use_head": False,
    },
}
"""The description of PaliGemma with 3 billion parameters, which leaves out what is usual."""


def test_the_description_of_paligemma_is_read() -> None:
    found = read(PUBLISHED, {})
    assert found is not None
    text = fakes.make(Decoder).import_hf(found.config)
    assert text is not None
    expected = {"dim": 2048, "layers": 18, "heads": 8, "kv_heads": 1, "head_dim": 256, "vocabulary": 257216}
    expected |= {"prefix": True, "tied": True, "max_sequence": 8192}
    assert {key: text.sections["decoder"][key] for key in expected} == expected
    assert text.sections["swiglu"] == {"activation": "geglu_tanh"}
    image = found.model.sections["image"]
    assert (image["layers"], image["size"], image["patch"], image["final_norm"]) == (27, 224, 14, True)


@pytest.mark.parametrize("kind", MISSING)
def test_what_a_text_config_leaves_out_is_as_in_transformers(kind: str) -> None:
    usual = transformers.AutoConfig.for_model(kind).to_dict()
    assert {key: usual[key] for key in MISSING[kind]} == MISSING[kind]


@pytest.mark.parametrize(
    ("options", "architecture", "fusion", "says"),
    [
        ({"connector": "mlp"}, "Gemma", "features", "image.connector: PaliGemma .* has 'linear', found 'mlp'"),
        ({"final_norm": False}, "Gemma", "features", "image.final_norm: siglip_vision_model .* has True, found False"),
        ({}, "Llama", "features", "is PaliGemma, which has one of GemmaForCausalLM, .*, found LlamaForCausalLM"),
        ({}, "Gemma2", "token", "images among the tokens; plugin 'it' joins them otherwise"),
    ],
)
def test_a_model_that_paligemma_is_not_is_not_written(
    options: dict[str, Any], architecture: str, fusion: str, says: str
) -> None:
    config = Image.Config(**{"merge": 1, "connector": "linear", **options})
    job: Any = SimpleNamespace(hooks=SimpleNamespace(provider=lambda slot: "it", gives=lambda slot: fusion))
    layout = HFModel(Rename({}), config={"architectures": [f"{architecture}ForCausalLM"]})
    with pytest.raises(ConfigError, match=says):
        write(config, Pictures(config), layout, job)


def test_without_images_a_prefix_has_no_layout() -> None:
    job, _ = tiny_models.composed("decoder.prefix=true")
    with pytest.raises(ConfigError, match=r"decoder.prefix: transformers has models whose prefixes"):
        hookspecs.export_hf(job)


def test_a_step_on_packed_chats_has_the_loss_of_transformers(tmp_path: Path) -> None:
    theirs = reference("Gemma", {})
    folder = saved(tmp_path / "folder", theirs)
    chats = [
        ("<image> a b", "g", "a"),
        ("<image> c", "h g h", "b"),
        ("d <image> e f", "a", "b"),
        ("<image> f", "b", "a"),
    ]
    (tmp_path / "chats.jsonl").write_text(
        "\n".join(
            json.dumps({"prompt": prompt, "completion": answer, "images": [str(folder / f"{name}.png")]})
            for prompt, answer, name in chats
        )
    )
    (tmp_path / "pali.jinja").write_text(
        "{% for one in messages %}{% if one.role == 'user' %}{{ one.content + ' ' }}{% else %}"
        "{% generation %}{{ one.content + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    options = {
        "sft.path": tmp_path / "chats.jsonl",
        "sft.template": tmp_path / "pali.jinja",
        "sft.cache": tmp_path / "cache",
        "sft.held_out": 0,
        "train.steps": 1,
        "train.global_batch": 2,
        "train.micro_batch": 1,
        "train.sequence": 48,
        "run.device": "cpu",
        "train.evaluate_every": 0,
    }
    asked = Request(
        model_from=str(folder),
        plugins=("image", "sft"),
        without=("console", "tensorboard"),
        set=tuple(f"{key}={value}" for key, value in options.items()),
    )
    found = imported(asked, tmp_path / "runs", lambda text: None)
    run = train(resolve(found), run_dir=tmp_path / "runs").run
    assert run is not None
    lines = (run / "metrics.jsonl").read_text().splitlines()

    total, count = 0.0, 0
    for prompt, answer, name in chats:
        words = " ".join([prompt.replace("<image>", "<image> " * 16), answer, "</s>"]).split()
        ids, size = torch.tensor([[WORDS.index(one) for one in words]]), len(answer.split()) + 1
        kinds = (torch.arange(len(words)) >= len(words) - size)[None].long()
        logits = theirs(input_ids=ids, pixel_values=seen(folder, name), token_type_ids=kinds).logits
        one = torch.nn.functional.cross_entropy(logits[0, -size - 1 : -1], ids[0, -size:], reduction="sum")
        total, count = total + one.item(), count + size
    assert json.loads(lines[0])["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("layout", ["published", "in memory"])
def test_other_names_of_tensors_are_read(layout: str, tmp_path: Path) -> None:
    theirs = reference("Gemma", {})
    folder = saved(tmp_path / "folder", theirs)
    stored = safetensors.load_file(folder / "model.safetensors")
    if layout == "in memory":
        stored = dict(theirs.state_dict())
        del stored["lm_head.weight"]
    else:
        stored = {name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in stored.items()}
        assert "language_model.model.norm.weight" in stored
    safetensors.save_file({name: one.clone() for name, one in stored.items()}, folder / "model.safetensors")
    mine = dict(open_model(folder, plugins=["image"]).module.named_parameters())
    theirs_norm = theirs.model.vision_tower.post_layernorm.weight
    assert torch.equal(mine["fusion.enter.encoders.image.vision.norm.weight"], theirs_norm)
    assert torch.equal(mine["embedding.weight"], theirs.lm_head.weight)

"""The plugin `hf` and the forms in which files hold tensors: experts one by one, fused, split, interleaved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import hf_models
from forge_train import ConfigError
from forge_train_kit.hf import HFModel
from forge_train_kit.hf.folder import Folder
from forge_train_kit.state_map import Box, Plan
from forge_train_plugins.models._hf.files import imported
from forge_train_plugins.models._hf.stored import from_files, held_by_files
from forge_train_plugins.models._hf.weights import Stored
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]

SPARSE = {**hf_models.GROUPED, "num_experts": 3, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LINEAR = {
    **hf_models.GROUPED,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "olmoe": SPARSE,
    "mixtral": {**hf_models.GROUPED, "num_local_experts": 3},  # other names of modules, too
    "qwen2_moe": {**SPARSE, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "deepseek_v3": {**hf_models.GROUPED, **LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    "olmo_hybrid": LINEAR,
    "hrm_text": {**hf_models.SHAPE, "num_key_value_heads": 4, "head_dim": 8},
}


def folder(path: Path, kind: str) -> Any:
    """A random model in a folder, as `save_pretrained` writes it."""
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **KINDS[kind]))
    model.save_pretrained(path)
    return model.eval()


def read(path: Path, layout: HFModel) -> dict[str, Tensor]:
    """Everything that a map makes of a folder."""
    opened = Folder.open(path)
    return dict(layout.map.plan(opened.described()).stream(opened.read))


@pytest.mark.parametrize("kind", KINDS)
def test_what_files_hold_becomes_the_tensors_of_the_class_and_comes_back(tmp_path: Path, kind: str) -> None:
    theirs = folder(tmp_path, kind)
    state = theirs.state_dict()
    held = held_by_files(theirs)
    assert any(one.operations for one in held)
    layout = HFModel(map=from_files(held, {name: name for name in state})[0])
    made = read(tmp_path, layout)
    assert made.keys() == state.keys()
    assert all(one.equal(state[name]) for name, one in made.items())

    def cut(name: str, box: Box) -> Tensor:
        return state[name][tuple(slice(*bounds) for bounds in box)]

    back = dict(layout.map.inverse().plan({n: (tuple(t.shape), t.dtype) for n, t in state.items()}).stream(cut))
    files = load_file(tmp_path / "model.safetensors")
    assert back.keys() == files.keys()
    assert all(one.equal(files[name]) for name, one in back.items())


@pytest.mark.parametrize("kind", KINDS)
def test_first_weights_are_those_of_the_folder(tmp_path: Path, kind: str) -> None:
    theirs = folder(tmp_path, kind)
    stored = Stored(str(tmp_path), theirs, "model")
    assert all(stored.parameter(name, 0).equal(one) for name, one in theirs.named_parameters())


@pytest.mark.parametrize("kind", ["olmoe", "mixtral"])
@pytest.mark.parametrize("form", ["one by one", "stacked"])
def test_a_folder_with_experts_is_imported_and_exported_as_published(tmp_path: Path, kind: str, form: str) -> None:
    theirs = folder(tmp_path / "theirs", kind)
    published = load_file(tmp_path / "theirs" / "model.safetensors")
    assert len([name for name in published if ".experts.2." in name]) == 6
    if form == "stacked":  # as in memory, which from_pretrained reads as well
        loose = {name: one for name, one in published.items() if ".experts." not in name}
        stacks = {name: one for name, one in theirs.state_dict().items() if ".experts." in name}
        save_file(loose | stacks, tmp_path / "theirs" / "model.safetensors")
    import_checkpoint(tmp_path / "theirs", tmp_path / "here", plugins=("hf",))
    export_checkpoint(tmp_path / "here", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == published.keys()
    assert all(one.equal(published[name]) for name, one in back.items())
    again, ids = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval(), torch.arange(12)[None]
    with torch.no_grad():
        assert again(ids).logits.equal(theirs(ids).logits)


def test_an_expert_is_read_without_the_others(tmp_path: Path) -> None:
    """As a rank does that has some of them."""
    theirs = folder(tmp_path, "olmoe")
    layout = imported(theirs.config.to_dict())
    assert layout is not None
    plan: Plan = layout.map.plan(Folder.open(tmp_path).described())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    shape = plan.targets[name].shape
    asked = [source for source, _ in plan.reads(name, ((1, 2), *((0, size) for size in shape[1:])))]
    assert asked == [f"model.layers.1.mlp.experts.1.{one}_proj.weight" for one in ("gate", "up")]


@pytest.mark.parametrize("way", ["import", "hf.weights"])
def test_an_expert_that_is_missing_is_named_as_in_the_files(tmp_path: Path, way: str) -> None:
    theirs = folder(tmp_path / "theirs", "olmoe")
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file({name: one for name, one in tensors.items() if name != lost}, tmp_path / "theirs" / "model.safetensors")
    ways = {
        "import": lambda: import_checkpoint(tmp_path / "theirs", tmp_path / "here", plugins=("hf",)),
        "hf.weights": lambda: Stored(str(tmp_path / "theirs"), theirs, "model"),
    }
    with pytest.raises(ConfigError, match=f"{lost}: missing"):
        ways[way]()


def test_operations_without_a_counterpart_leave_the_names_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a folder is then refused by name, and never read in another order."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import MergeModulelist

    class Turned(MergeModulelist):
        """Of another kind."""

    config = transformers.AutoConfig.for_model("olmoe", **SPARSE)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    declared = get_model_conversion_mapping(model, add_legacy=False)
    for one in declared:
        if hasattr(one, "operations"):
            one.operations = [Turned(dim=0), *one.operations[1:]]
    monkeypatch.setattr("forge_train_plugins.models._hf.stored.get_model_conversion_mapping", lambda *_, **__: declared)
    assert all(one.here == one.files for one in held_by_files(model))


ALLOWED: Mapping[str, tuple[dict[str, Any], tuple[str, str], set[str]]] = {
    # What a folder holds otherwise (None: not at all), what is allowed, and the weights that then start anew.
    "an expert more": (
        {"1.mlp.experts.3.gate_proj": torch.zeros(48, 32), "1.mlp.experts.3.up_proj": torch.zeros(48, 32)}
        | {"1.mlp.experts.3.down_proj": torch.zeros(32, 48)},
        ("allow_extra", "*experts.3.*"),
        set(),
    ),
    "the last expert missing": (
        {f"1.mlp.experts.2.{name}_proj": None for name in ("gate", "up", "down")},
        ("allow_missing", "*experts.2.*"),
        {"gate_up_proj", "down_proj"},
    ),
    "a part of the first expert missing": (
        {"1.mlp.experts.0.up_proj": None},
        ("allow_missing", "*experts.0.*"),
        {"gate_up_proj"},
    ),
    "an expert of another shape": (
        {"1.mlp.experts.1.down_proj": torch.zeros(32, 47)},
        ("allow_missing", "*.1.down_proj.*"),
        {"down_proj"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["hf", "decoder"])
@pytest.mark.parametrize("case", ALLOWED)
def test_experts_that_are_allowed_to_differ(tmp_path: Path, case: str, plugin: str) -> None:
    """A stack that lacks one of its experts starts anew as a whole; one that is not the model's is left out."""
    changes, (way, pattern), anew = ALLOWED[case]
    folder(tmp_path / "theirs", "olmoe")
    tensors: dict[str, Any] = load_file(tmp_path / "theirs" / "model.safetensors")
    whole = dict(tensors)
    tensors |= {f"model.layers.{name}.weight": one for name, one in changes.items()}
    save_file({n: t for n, t in tensors.items() if t is not None}, tmp_path / "theirs" / "model.safetensors")
    asked: dict[str, Any] = {"plugins": (plugin,)}
    with pytest.raises(ConfigError, match="the tensors are not those"):
        import_checkpoint(tmp_path / "theirs", tmp_path / "no", **asked)
    done = import_checkpoint(tmp_path / "theirs", tmp_path / "here", **asked, **{way: (pattern,)})
    assert any("as in a new model" in note for note in done.notes) == bool(anew)
    export_checkpoint(tmp_path / "here", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == whole.keys()
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    fresh = {name for one in anew for name in names[one]}
    if plugin == "decoder" and case == "a part of the first expert missing":
        fresh = {"up_proj"}  # gate and up are apart there
    for name, one in back.items():
        new = name.startswith("model.layers.1.mlp.experts.") and name.split(".")[-2] in fresh
        assert one.equal(whole[name]) != new, name

"""The plugin `lora` in one process: what it adapts, freezes, keeps and refuses, and that its gradients are PEFT's."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chat_model
import hf_models
from forge_train import ConfigError, Model
from forge_train.checkpoint.checkpoint import shapes
from forge_train_plugins.tuning._lora.adapters import Adapters
from forge_train_plugins.tuning._lora.peft import Factors
from forge_train_plugins.tuning._lora.sizes import Sizes
from forge_train_plugins.tuning.lora import LoRA
from forge_train_tools.offline.adapters import export_adapter
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model
from forge_train_tools.testing import run_forge
from lora_models import logits, started, trained

pytestmark = pytest.mark.unit

FREE = {"train.init_missing": [], "checkpoint.only": []}
"""Random weights beneath, and whole checkpoints."""
LINEARS = ("attention.q", "attention.k", "attention.v", "attention.o")
BLOCK = ("feed_forward.gate", "feed_forward.up", "feed_forward.down")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    return run_forge(steps=2, folder=tmp_path_factory.mktemp("base"), name="base").run


def tuned(folder: Path, base: Path, config: dict[str, Any] | None = None, **more: Any) -> Any:
    values = {"train.init_from": str(base), "adamw.lr": 0.01, **(config or {})}
    return run_forge(("lora",), values, folder=folder, **more)


def test_adapts_every_linear_of_a_block_and_keeps_nothing_else(base: Path, tmp_path: Path) -> None:
    run = tuned(tmp_path, base)
    trained = {name: one for name, one in run.model.named_parameters() if one.requires_grad}
    layers = {int(name.split(".")[1]) for name in trained}
    names = {
        f"layers.{layer}.{linear}.lora_{factor}" for layer in layers for linear in LINEARS + BLOCK for factor in "AB"
    }
    assert trained.keys() == names
    assert all(one.grad is None for one in run.model.parameters() if not one.requires_grad)
    assert {id(one) for one in run.optimizer.state} == {id(one) for one in trained.values()}
    held = {name for name in shapes(run.run / "checkpoints" / "step-00000003") if name.startswith("model.")}
    assert held == {f"model.{name}" for name in names}
    before, after = (open_model(path, text=False).model.state_dict() for path in (base, run.run))
    assert all(torch.equal(one, after[name]) for name, one in before.items())


def test_modules_are_tuned_in_full_beside_updates(base: Path, tmp_path: Path) -> None:
    """They have gradients, optimizer state and a place in checkpoints, and a resumed run goes on with them."""
    config = {"lora.modules": ["*.q"], "lora.tune": ["*norm", "head"]}
    run = tuned(tmp_path / "straight", base, config)
    trained = {name for name, one in run.model.named_parameters() if one.requires_grad}
    whole = {name for name in trained if "lora_" not in name}
    assert whole == {"norm.weight", "head.weight"} | {
        f"layers.{layer}.{norm}.weight" for layer in (0, 1) for norm in ("attention_norm", "feed_forward_norm")
    }
    held = {name for name in shapes(run.run / "checkpoints" / "step-00000003") if name.startswith("model.")}
    assert held == {f"model.{name}" for name in trained}
    before, after = (open_model(path, text=False).model.state_dict() for path in (base, run.run))
    moved = {name for name, one in before.items() if not torch.equal(one, after[name])}
    assert moved == whole
    tuned(tmp_path, base, config, name="r", stop_at=2)
    assert tuned(tmp_path, base, config, name="r").losses[-1] == run.losses[-1]


def test_by_default_a_linear_of_one_row_is_left_alone(tmp_path: Path) -> None:
    """The gate of a shared expert; any rank would be above its dimension."""
    free = {"train": {"init_missing": []}, "checkpoint": {"only": []}}
    _, model = hf_models.composed(tmp_path, "qwen2_moe", plugins=("lora",), lora={"rank": 4}, **free)
    adapted = {name.rpartition(".")[0] for name, one in model.named_parameters() if one.requires_grad}
    assert any(name.endswith("shared_expert.gate_proj") for name in adapted)
    assert not any(name.endswith("shared_expert_gate") for name in adapted)


def test_begins_with_the_function_of_its_base(base: Path, tmp_path: Path) -> None:
    run = tuned(tmp_path, base, {"adamw.lr": 1e-30, "adamw.weight_decay": 0.0}, steps=1)
    alone = run_forge((), {"train.init_from": str(base)}, steps=1, folder=tmp_path / "alone")
    assert run.losses == alone.losses
    factors = {name: one for name, one in run.model.named_parameters() if one.requires_grad}
    assert all(one.abs().max() < 1e-20 for name, one in factors.items() if name.endswith("lora_B"))
    bounds = {name: one.shape[1] ** -0.5 for name, one in factors.items() if name.endswith("lora_A")}
    assert all(0.9 * bound < factors[name].abs().max() <= bound for name, bound in bounds.items())


def test_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    other = run_forge(steps=1, folder=tmp_path / "other", name="other").run
    tuned(tmp_path, base, name="run", stop_at=2)
    with pytest.raises(ConfigError, match=r"holds a part of the weights, and the others are those of .*holds others"):
        tuned(tmp_path, other, name="run")
    assert tuned(tmp_path, base, name="run").finished.step == 3


def test_a_model_without_the_updates_says_how_to_merge_them(base: Path, tmp_path: Path) -> None:
    path = tuned(tmp_path, base, name="run").run
    merge = (
        r"lora_A: .* absent in this model\n(.*\n)+Merge what its run added into a model first: forge checkpoint export"
    )
    with pytest.raises(ConfigError, match=merge):
        run_forge(config={"train.init_from": str(path)}, folder=tmp_path, name="plain")
    with pytest.raises(ConfigError) as raised:
        run_forge(config={"train.init_from": str(path), "decoder.layers": 3}, folder=tmp_path, name="other")
    assert "holds another model" in str(raised.value)
    assert "Merge" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"lora.modules": ["*.q", "*.gat"]},
            r"lora\.modules: '\*\.gat' matches nothing that lora adapts\. Did you mean '\*\.gate'\?",
        ),
        ({"lora.modules": ["*.embedding"]}, r"'\*\.embedding' matches nothing .*\. Did you mean 'embedding'\?"),
        ({"lora.modules": ["*.atention.*"]}, r"matches nothing that lora adapts\. Did you mean '\*\.attention\.\*'\?"),
        ({"lora.modules": ["query"]}, r"'query' matches nothing that lora adapts\. There are \*\.down, "),
        (
            {"lora.modules": ["*.q"], "lora.groups": [{"match": "*.down", "rank": 1}]},
            r"lora\.groups: '\*\.down' matches nothing that lora adapts\. There are \*\.q\.",
        ),
        (
            {"lora.groups": [{"match": "*.q", "rank": 1}, {"match": "*.attention.*", "rank": 2}]},
            r"lora\.groups: '\*\.q' and '\*\.attention\.\*' both match 'layers\.0\.attention\.q'",
        ),
        ({"lora.groups": [{"match": "*.q"}]}, r"lora\.groups: '\*\.q' changes nothing; set its rank or its alpha"),
        ({"lora.tune": ["nrm"]}, r"lora\.tune: 'nrm' matches no module\. Did you mean 'norm'\?"),
        (
            {"lora.tune": ["layers.1"]},
            r"lora\.tune: 'layers\.1\.attention\.q' has an update already: leave it out here",
        ),
        (
            {"lora.tune": ["*.q"]},
            r"lora\.tune: 'layers\.0\.attention\.q' has an update already: leave it out here",
        ),
        ({"lora.rank": 1000}, r"lora\.rank: 1000 is above a dimension of 'layers\.0\.attention\.q' \("),
        (
            {"decoder.tied": True, "lora.modules": ["head"]},
            r"lora\.modules: 'head\.weight' is tied to 'embedding\.weight'.*Leave it out, or untie them",
        ),
        (
            {"decoder.tied": True, "lora.modules": ["embedding"]},
            r"lora\.modules: 'embedding\.weight' is tied to 'head\.weight'",
        ),
        (
            {"decoder.tied": True, "lora.tune": ["embedding"]},
            r"lora\.tune: 'embedding\.weight' and 'head\.weight' are tied, and an adapter can hold only one of them",
        ),
        ({"train.init_from": ""}, r"needs a checkpoint that gives the other weights; set train\.init_from"),
    ],
)
def test_what_can_not_be_is_refused(base: Path, tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tuned(tmp_path, base, config)


class Past(nn.Module):
    """Multiplies with the weight of one of its linears itself."""

    units = ("block",)

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("called", "read")})

    def forward(self, x: Tensor) -> Tensor:
        read: Any = self.block["read"]
        out: Tensor = self.block["called"](x) @ read.weight
        return out


def test_a_linear_that_the_model_does_not_call_is_named() -> None:
    job: Any = SimpleNamespace(dist=SimpleNamespace(main=False, layout=SimpleNamespace(pp=1)))
    part, adapters = Past(), Adapters(LoRA.Config(rank=2), job)
    adapters.apply(part)
    for module in part.block.values():
        for factor in ("lora_A", "lora_B"):
            setattr(module, factor, nn.Parameter(torch.ones_like(getattr(module, factor), device="cpu")))
    adapters.begin(Model([part]), torch.optim.SGD(one for one in part.parameters() if one.requires_grad))
    part(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ConfigError, match=r"lora\.modules: the model computes block\.read without calling the linear"):
        adapters.check_used()


def test_sizes_scales_and_learning_rates_by_pattern(tmp_path: Path) -> None:
    groups = [{"match": "*.v", "rank": 2}, {"match": "layers.0.feed_forward.*", "alpha": 3.0}]
    own = {"lora.rank": 4, "lora.alpha": 6.0, "lora.groups": groups, "lora.rslora": True, "lora.lr_ratio": 16.0}
    run = run_forge(("lora",), {**FREE, **own}, folder=tmp_path, steps=1)
    modules = dict(run.model.named_modules())
    for name, rank, alpha in (("attention.v", 2, 6), ("feed_forward.up", 4, 3), ("attention.q", 4, 6)):
        one: Any = modules[f"layers.0.{name}"]
        assert (one.lora_A.shape[0], one.lora_B.shape[1]) == (rank, rank)
        assert one.lora_scales == {"weight": alpha / math.sqrt(rank)}
    rates = {id(one): group["initial_lr"] for group in run.optimizer.param_groups for one in group["params"]}
    v: Any = modules["layers.1.attention.v"]
    assert rates[id(v.lora_B)] == pytest.approx(16 * rates[id(v.lora_A)])


def test_an_optimizer_that_reads_no_factors_is_refused(tmp_path: Path) -> None:
    groups = [{"match": "*.lora_B", "lr": 2.0}]
    with pytest.raises(ConfigError, match=r"lora\.lr_ratio: lora_B of 'layers\.0\.attention\.q' learns at "):
        run_forge(("lora",), {**FREE, "lora.lr_ratio": 3.0, "adamw.groups": groups}, folder=tmp_path)


@pytest.mark.parametrize(
    ("dtype", "modules"), [(None, ["*.attention.*", "embedding", "head"]), (torch.bfloat16, ["*.down"])]
)
def test_an_export_is_merged(tmp_path: Path, dtype: torch.dtype | None, modules: list[str]) -> None:
    """Its logits are those of the run; the dtype is the base's."""
    transformers = pytest.importorskip("transformers")
    run = trained(tmp_path, f"lora.modules={modules}", "adamw.lr=0.02", dtype=dtype)
    export_checkpoint(run, tmp_path / "out")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.dtype is (dtype or torch.float32)
    opened = open_model(run, text=False)
    ids = torch.arange(32).view(2, 16)
    with torch.no_grad():
        ours, theirs = logits(opened.model, ids), merged.float()(ids).logits
        before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(ids).logits
    assert (ours - before).abs().max() > 0.1
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6 if dtype is None else 0.05)


@pytest.mark.parametrize(
    ("linears", "tuned"),
    [((), ()), (("*.q", "layers.1.*.down", "embedding", "head"), ()), (("*.q",), ("*norm", "embedding", "head"))],
)
def test_peft_loads_the_adapter_alone(tmp_path: Path, linears: tuple[str, ...], tuned: tuple[str, ...]) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    settings = ["lora.rank=4", "lora.groups=[{match = 'layers.1.*', rank = 2, alpha = 5.0}]", "lora.rslora=true"]
    settings += [f"lora.tune={[*tuned]}"] if tuned else []
    settings += [f"lora.modules={[*linears]}"] if linears else []
    run = trained(tmp_path, *settings)
    done = export_adapter(run, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    loaded: Any = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False)
    assert loaded.peft_config["default"].base_model_name_or_path == str(tmp_path / "hf")
    held = {name: one for name, one in loaded.named_parameters() if ".lora_" in name or ".modules_to_save." in name}
    assert sum(one.numel() for one in held.values()) == done.parameters
    ids = torch.arange(32).view(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(ids).logits, logits(open_model(run, text=False).model, ids), rtol=0, atol=1e-6
        )


def test_an_adapter_of_fused_projections_has_no_place(tmp_path: Path, base: Path) -> None:
    """By `export_adapter`, which is not told of them."""
    factors = {"up.lora_A": ((2, 4), torch.float32), "up.lora_B": ((4, 2), torch.float32)}
    step = Factors(LoRA.Config(), Sizes(LoRA.Config()), {}).trace(factors)
    assert step.wrong == ["up: its weight has no tensor of its own in Hugging Face layout; export the merged model"]
    with pytest.raises(
        ConfigError, match=r"none of its plugins adapts a model \(export_adapter\); leave --adapter out"
    ):
        export_adapter(base, tmp_path / "out")


@pytest.mark.parametrize(("kind", "rslora"), [("llama", False), ("cohere", True)])
def test_logits_and_gradients_are_those_of_peft(tmp_path: Path, kind: str, rslora: bool) -> None:
    """A family of `decoder`, and a class of `hf`."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = tmp_path / "hf"
    if kind == "llama":
        chat_model.write_model(folder)
    else:
        config = transformers.AutoConfig.for_model(kind, **{**hf_models.MODELS[kind], "vocab_size": 300})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ranks = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}}
    named = ["lm_head", "embed_tokens"] if kind == "llama" else []  # which cohere ties
    adapted = [name for name, _ in theirs.named_modules() if name.endswith(("_proj", *named))]
    wanted = peft.LoraConfig(r=4, lora_alpha=8, target_modules=adapted, use_rslora=rslora, **ranks)
    theirs = peft.get_peft_model(theirs, wanted)
    value = "v" if kind == "llama" else "v_proj"
    own = (f"lora.groups=[{{match = '*.{value}', rank = 2, alpha = 3.0}}]", f"lora.rslora={str(rslora).lower()}")
    own += ("lora.modules=['*']",) if named else ()
    _, model = started(folder, "lora.rank=4", "lora.alpha=8.0", *own, plugins=() if kind == "llama" else ("hf",))
    pairs = dict(paired(theirs, model))
    assert len(pairs) == 2 * (2 * 7 + len(named))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one, other in pairs.values():
            one.copy_(torch.randn(one.shape, generator=generator) * 0.2)
            other.copy_(one)
    ids = torch.arange(24).view(2, 12)
    found, expected = logits(model, ids), theirs(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    for one in (found, expected):
        nn.functional.cross_entropy(one.flatten(0, 1), (ids.flatten() + 1) % 50).backward()
    for name, (one, other) in pairs.items():
        assert (other.grad - one.grad).norm() <= 1e-5 * one.grad.norm(), name


def paired(theirs: nn.Module, model: Model) -> Any:
    """Their factors, and ours of the same weight."""
    calls = {"self_attn": "attention", "mlp": "feed_forward", "q_proj": "q", "k_proj": "k", "v_proj": "v"}
    calls |= {"o_proj": "o", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    calls |= {"lm_head": "head", "embed_tokens": "embedding"}
    ours = dict(model.named_parameters())
    for name, one in theirs.named_parameters():
        if one.requires_grad:
            path = name.removeprefix("base_model.model.").removesuffix(".weight").removesuffix(".default")
            family = ".".join(calls.get(part, part) for part in path.removeprefix("model.").split("."))
            yield path, (one, ours[path if path in ours else family])

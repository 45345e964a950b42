"""Random tiny models of transformers, what forge makes of their `config.json`, and whether both agree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakes
from forge_train import Plugin
from forge_train_kit.hf import HFModel
from forge_train_plugins.attention.mla import MLA
from forge_train_plugins.attention.sdpa import SDPA
from forge_train_plugins.experts._alltoall.transport import Local
from forge_train_plugins.experts.moe import MoE
from forge_train_plugins.models.decoder import Decoder, Rope

HEADS = {"GPT2": "GPT2LMHeadModel"}
"""Classes that are not named like the others."""
TOKENS = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(1))
PROMPT = TOKENS[:1, :12]


def theirs(transformers: Any, family: str, **values: Any) -> Any:
    """A random model, in eager fp32 attention."""
    text = "Text" if family in ("Gemma3", "Mllama") else ""
    config = getattr(transformers, f"{family}{text}Config")(**values)
    config._attn_implementation = "eager"
    model = fakes.initialised(getattr(transformers, HEADS.get(family, f"{family}ForCausalLM"))(config).eval())
    if family.startswith("Gemma"):  # whose norms multiply by 1 + weight
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= float("norm" in name)
    return model


def saved_config(model: nn.Module) -> dict[str, Any]:
    """As `save_pretrained` writes it."""
    config: dict[str, Any] = model.config.to_diff_dict()  # type: ignore[operator,union-attr]
    config = config | {"architectures": [type(model).__name__]}
    return json.loads(json.dumps(config))  # type: ignore[no-any-return]


def imported(config: dict[str, Any], kernel: type[Plugin] = SDPA) -> tuple[HFModel, Any, Any]:
    """The layout, the plugin with its section, and the job that it builds and exports models for."""
    found = fakes.make(Decoder).import_hf(config)
    assert found is not None
    values = dict(found.sections["decoder"])
    plugin = fakes.make(Decoder, **(values | {"rope": Rope(**values["rope"])}))
    assert not list(plugin.check_config(fakes.run_config()))
    job = fakes.job(**found.sections["swiglu"])
    job.hooks.sdpa = fakes.make(kernel)
    if "moe" in found.sections:
        _with_experts(job, fakes.make(MoE, **found.sections["moe"]))
    if "mla" in found.sections:
        mla = fakes.make(MLA, **found.sections["mla"])
        job.config.sections["mla"] = mla.config
        job.hooks.attention = lambda layer: mla.attention(layer, job)
    return found, plugin, job


def _with_experts(job: Any, moe: Any) -> None:
    dense = job.hooks.feed_forward
    job.config.sections["moe"] = moe.config
    job.dist.layout = SimpleNamespace(tp=1, etp=1, cp=1)
    job.hooks.token_dispatch = Local
    job.hooks.feed_forward = lambda layer: moe.feed_forward(layer, job) or dense(layer)


def mapped(found: HFModel, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors under transformers' names → those under forge's."""
    described = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    fitting = max((found.map, *found.others), key=lambda one: len(one.trace(described).taken))
    plan = fitting.plan(described)
    return dict(plan.stream(lambda name, box: tensors[name][tuple(slice(*bounds) for bounds in box)]))


def copied(
    reference: nn.Module, config: dict[str, Any] | None = None, kernel: type[Plugin] = SDPA
) -> tuple[HFModel, Any]:
    """The layout by a `config.json`, its own by default, and forge's model with the weights of another one."""
    found, plugin, job = imported(config or saved_config(reference), kernel)
    model = plugin.build_model(job)
    weights, stored = dict(reference.named_parameters()), reference.state_dict()
    weights |= {name: buffer for name, buffer in reference.named_buffers() if name in stored}
    parameters, values = dict(model.named_parameters()), mapped(found, weights)
    stored = model.state_dict()
    parameters |= {name: buffer for name, buffer in model.named_buffers() if name in stored}
    assert parameters.keys() == values.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
    return found, model


# -- whether both agree -----------------------------------------------------------------------------------------------


def agree(reference: nn.Module, kernel: type[Plugin] = SDPA) -> Any:
    """Forge's model, whose logits and gradients are those of another one."""
    found, model = copied(reference, kernel=kernel)
    expected, logits = reference(TOKENS).logits, model.head(model(TOKENS))
    assert (logits - expected).abs().max() <= 1e-5
    for output in (expected, logits):
        F.cross_entropy(output[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    stored = reference.state_dict()
    buffers = {name: one for name, one in reference.named_buffers() if name in stored}
    gradients = mapped(found, {name: p.grad for name, p in reference.named_parameters()} | buffers)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-5)
    return model


@torch.no_grad()
def generated(model: Any, ids: Tensor, count: int, *, cached: bool = True) -> Tensor:
    """A prompt and the most likely tokens after it."""
    cache, new = model.new_cache(1, ids.shape[1] + count) if cached else None, ids
    for _ in range(count):
        new = model.head(model(new if cached else ids, cache=cache)[:, -1:]).argmax(-1)
        ids = torch.cat([ids, new], 1)
    return ids


def generates_the_same(reference: Any, kernel: type[Plugin] = SDPA, *, cached: bool = True, **options: Any) -> None:
    """64 tokens, by both; `options` are those of transformers."""
    expected = reference.generate(PROMPT, do_sample=False, max_new_tokens=64, min_new_tokens=64, **options)
    assert torch.equal(generated(copied(reference, kernel=kernel)[1], PROMPT, 64, cached=cached), expected)


def comes_back(transformers: Any, reference: nn.Module, kernel: type[Plugin] = SDPA) -> None:
    """transformers builds the model of an exported description, and Forge understands it again."""
    found, plugin, job = imported(saved_config(reference), kernel)
    exported = plugin.export_hf(job)
    assert exported.map == found.map
    config = transformers.AutoConfig.for_model(**{**exported.config, "pad_token_id": None})
    config._attn_implementation = "eager"
    again = getattr(transformers, exported.config["architectures"][0])(config).eval()
    assert type(again) is type(reference)
    missing, unexpected = again.load_state_dict(reference.state_dict(), strict=False)
    assert (missing, unexpected) == ([], [])
    torch.testing.assert_close(again(TOKENS).logits, reference(TOKENS).logits)
    reread = fakes.make(Decoder).import_hf(json.loads(json.dumps(exported.config)))
    assert reread.sections == found.sections

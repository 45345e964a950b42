"""Random tiny models of transformers, and what forge makes of their `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import fakes
from forge_train import HFModel, Plugin
from forge_train_plugins.attention.mla import MLA
from forge_train_plugins.attention.sdpa import SDPA
from forge_train_plugins.experts._alltoall.transport import Local
from forge_train_plugins.experts.moe import MoE
from forge_train_plugins.models.decoder import Decoder, Rope


def theirs(transformers: Any, family: str, **values: Any) -> Any:
    """A random model, in eager fp32 attention."""
    config = getattr(transformers, f"{'Gemma3Text' if family == 'Gemma3' else family}Config")(**values)
    config._attn_implementation = "eager"
    model = fakes.initialised(getattr(transformers, f"{family}ForCausalLM")(config).eval())
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

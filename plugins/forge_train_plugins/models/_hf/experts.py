"""The experts of a class of `transformers`, spread over ranks as its plan of expert parallelism says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_train import ConfigError
from forge_train.base.format import format_list
from forge_train.mesh.tensors import local
from forge_train_kit.specialisation import Specialisation

from ...experts.hookspecs import token_dispatch

if TYPE_CHECKING:
    from forge_train import Job

MODULE, PARAMETER = "ep_dispatch_experts", "grouped_gemm"
"""Kinds of the library's plan: a module that is given tokens with their experts, and a parameter whose first axis
counts experts."""


def take(inner: Any, job: Job) -> None:
    """Have the modules of experts say how they are split, and go through the run's transport of tokens if it has one.

    They say so on every layout, since what an optimizer does to experts must not depend on it.

    Args:
        inner: the class's model without its head.
        job: whose slot `token_dispatch` carries rows.

    Raises:
        ConfigError: where experts are to be spread, and the class does not declare enough.
    """
    name, layout = type(inner).__name__, job.dist.layout
    declared: Mapping[str, str] = getattr(inner.config.get_text_config(), "base_model_ep_plan", None) or {}
    found = [(path, module) for path, module in inner.named_modules() if declared.get(_pattern(path)) == MODULE]
    if lacking := _lacking(inner, declared, found):
        if layout.ep > 1:
            raise ConfigError(f"hf: {name} of transformers {lacking}; set parallel.ep = 1.")
        return
    if layout.etp > 1:
        raise ConfigError(f"hf: the experts of {name} of transformers can't be split within; set parallel.etp = 1.")
    transport = token_dispatch(job) if job.hooks.provider("token_dispatch") else None
    declaring, travelling = Specialisation(_declaring), Specialisation(_travelling)
    for _, module in found:
        if transport is not None:
            module.transport = transport
            travelling(module)
        declaring(module)


def _lacking(inner: nn.Module, declared: Mapping[str, str], found: list[tuple[str, nn.Module]]) -> str:
    """Name what the class does not declare, or declares without a counterpart in Forge; empty for nothing."""
    if not declared:
        return "declares no base_model_ep_plan"
    if not found:
        others = sorted(f"{pattern} ({kind})" for pattern, kind in declared.items())
        return f"has no module of the kind {MODULE} in its base_model_ep_plan, which names {format_list(others, 4)}"
    split = {name for name, _ in inner.named_parameters() if declared.get(_pattern(name)) == PARAMETER}
    for path, module in found:
        at = _pattern(path)
        if not hasattr(module, "_is_expert_parallel") or not isinstance(getattr(module, "num_experts", None), int):
            return f"plans {at} ({MODULE}), whose {type(module).__name__} is not of the library's experts interface"
        own = {f"{path}.{key}": one for key, one in module.named_parameters()}
        if left := sorted(own.keys() - split):
            kinds = [f"{_pattern(one)} ({declared.get(_pattern(one), 'no kind')})" for one in left]
            return f"plans {format_list(kinds, 4)} within {at}, and all parameters of experts must be {PARAMETER}"
        if uneven := sorted(key for key, one in own.items() if one.shape[0] != module.num_experts):
            return f"has {format_list(uneven, 2)}, whose first axis does not count the {module.num_experts} experts"
        split -= own.keys()
    return f"plans {format_list(sorted(map(_pattern, split)), 4)} ({PARAMETER}) outside of experts" if split else ""


def _pattern(path: str) -> str:
    """As the library's plans name modules of any layer."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _declaring(own: Any) -> Mapping[str, Any]:
    def expert_plan(self: Any) -> dict[str, tuple[int, int]]:
        """The axis of experts; no axis within one is ever split."""
        return {name: (0, 1) for name, _ in self.named_parameters()}

    return {"domain": "expert", "expert_plan": expert_plan}


def _travelling(own: Any) -> Mapping[str, Any]:
    """Experts whose rows are brought to their rank. The class's own forward computes those that are here, each with a
    weight of 1; the weights follow where rows come together."""

    @torch.compiler.disable(reason="how many rows go where depends on data")  # type: ignore[untyped-decorator,no-untyped-call]
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`hidden_states [tokens, dim]`, `top_k_index` and `top_k_weights [tokens, top_k]` → `[tokens, dim]`."""
        rows, sizes, handle = self.transport.dispatch(hidden_states, top_k_index, self.num_experts)
        here = object.__new__(own)
        held = {name: local(one) for name, one in self._parameters.items()}
        # The library's mark of experts that are split: it passes over rows of an expert beyond the last one.
        vars(here).update(vars(self) | {"_parameters": held, "num_experts": len(sizes), "_is_expert_parallel": True})
        computed = own.forward(here, *_assigned(rows, sizes))[: len(rows)]
        combined: Tensor = self.transport.combine(computed, top_k_weights.to(hidden_states.dtype), handle)
        return combined

    return {"forward": forward}


def _assigned(rows: Tensor, sizes: Tensor) -> Iterator[Tensor]:
    """Rows sorted by expert, the expert of each, `[rows, 1]`, and its weight. Kernels take no 0 rows; their sum stands
    in for them, so that gradients go the same way on every rank."""
    rows = rows if len(rows) else rows.sum(0, keepdim=True)
    each = torch.arange(len(rows), device=rows.device)
    experts = torch.searchsorted(sizes.cumsum(0), each, right=True)
    yield from (rows, experts.unsqueeze(1), rows.new_ones(len(rows), 1))

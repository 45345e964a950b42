"""Builds the model from the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from forge_train import ConfigError
from forge_train.base.errors import describe
from forge_train.base.format import format_list
from forge_train_kit import hookspecs, kernels
from forge_train_kit.capabilities import KernelCapabilities, capabilities_of
from forge_train_kit.heads import HeadSpec
from forge_train_kit.model import Dropout

from . import attention, experts, stages
from .config import model_class
from .head import head_of
from .items import items_of
from .model import CausalLM, Facts, no_documents
from .weights import Drawn, Stored

if TYPE_CHECKING:
    from forge_train import Job

_PROBED = 8
"""Number of tokens in the run on the meta device."""


def build(config: PreTrainedConfig, job: Job, weights: str) -> CausalLM:
    """Build the model on the meta device; the run's kernel computes attention if the class allows that.

    Raises:
        ConfigError: naming what the class lacks.
    """
    kind = model_class(config)
    config._attn_implementation = "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
    try:
        model = kind(config)
    except Exception as error:  # a class may raise anything
        raise ConfigError(f"hf: {kind.__name__} can't be built from its configuration: {describe(error)}") from error
    name, base = kind.__name__, kind.base_model_prefix
    if not isinstance(getattr(model, base, None), nn.Module):
        raise ConfigError(f"hf: {name} has no module {base!r}, although its base_model_prefix names it.")
    _check_values(model)
    inner = getattr(model, base)
    units = _units(model)
    staging = stages.staged(inner)
    if isinstance(staging, stages.Staging) and job.dist.layout.pp > 1:
        staging = stages.separable(inner, staging, _inputs()) or staging
    dropouts = _watched_dropout(model)
    asked = attention.probe(inner, lambda: inner(**_inputs(), document_ids=_inputs()["position_ids"], use_cache=False))
    _forget(model)
    _swap_dropout(model, dropouts, job)
    _check_dropout(model)
    widths, kernel = dict[str, int](), False
    if asked is not None and (chosen := job.hooks.provider("attention_kernel")):
        heads = {path: asked.heads[id(one)] for path, one in model.named_modules() if id(one) in asked.heads}
        widths = {path: count * features for path, (count, _, features) in heads.items()}
        lacking = [*capabilities_of(job.hooks.enabled[chosen].cls).lacks(asked.needs)]
        kernel = not lacking
        if lacking and (job.dist.layout.tp > 1 or job.dist.layout.cp > 1):
            raise ConfigError(
                f"hf: attention of {name} needs {format_list(lacking)}, which plugin {chosen!r} does not support, so "
                "tp and cp can't split it; enable a kernel that does, such as eager."
            )
    reached = asked.documents if asked is not None else set()
    reaches = all(
        any(id(one) in reached for one in model.get_submodule(unit).modules()) for unit in _read(model, units)
    )
    isolates = kernel and reaches
    for reason, needs in kernels.needs_of(job.hooks, job.config):
        if needs.documents and not isolates:
            ways_out = _ways_out(job, asked.needs if asked is not None and reaches else None)
            raise ConfigError(f"{no_documents(name)}. {reason}{ways_out}")
    if asked is not None and kernel:
        attention.take(model, kernels.kernel_with(KernelCapabilities(), job), asked)
    experts.take(inner, job)
    drawn = Drawn(type(config).from_dict(config.to_dict()), units)
    given = job.hooks.gives("head") if job.hooks.provider("head") else "token_logits"
    text = config.get_text_config()
    spec = HeadSpec(text.hidden_size, text.vocab_size, getattr(text, "initializer_range", None) or 0.02)
    head: Any = head_of(model, base) if given == "token_logits" else hookspecs.head(spec, job)
    facts = Facts(kernel, isolates, widths, staging)
    tp = job.dist.layout.tp
    piece = (job.dist.mesh("dense", "tp").get_local_rank(), tp) if tp > 1 else (0, 1)
    made = CausalLM(base, inner, head, drawn, facts, units, piece)
    made.items = items_of(model, base, job)
    if weights:
        made.stored = Stored(weights, model, base, headless=given != "token_logits")
    return made


def _ways_out(job: Job, needs: KernelCapabilities | None) -> str:
    """Suggest ways out if documents can't be kept apart.

    Args:
        job: of the run.
        needs: kernel capabilities with which the class's attention would keep them apart; None if no kernel can.
    """
    found = ""
    if needs is not None:
        wanted = [replace(needs, documents=True), *(one for _, one in kernels.needs_of(job.hooks, job.config))]
        able = kernels.able(wanted, job.device.type)
        found = (
            f" Installed kernels that keep them apart: {', '.join(able)}; enable one with --plugins." if able else ""
        )
    name = job.hooks.provider("build_data") or ""
    section = job.config.sections.get(name)
    if not getattr(section, "isolate", False):
        return found
    packing = f"-s {name}.packing=split " if getattr(section, "packing", "split") != "split" else ""
    return f"{found} To join the documents of a row into one text, add {packing}-s {name}.isolate=false."


def _inputs() -> dict[str, torch.Tensor]:
    """The inputs of a run on the meta device."""
    return {name: torch.zeros(1, _PROBED, dtype=torch.int64, device="meta") for name in ("input_ids", "position_ids")}


def _units(model: Any) -> tuple[str, ...]:
    """The outermost modules whose classes must not be split."""
    kinds = model._no_split_modules or ()
    found: list[str] = []
    for path, module in model.named_modules():
        if type(module).__name__ in kinds and not any(path.startswith(f"{above}.") for above in found):
            found.append(path)
    return tuple(found)


def _read(model: Any, units: tuple[str, ...]) -> list[str]:
    """The units that tokens pass, without those of an encoder of images."""
    decoder = model.get_decoder()
    path = next((f"{path}." for path, one in model.named_modules() if one is decoder and path), "")
    return [unit for unit in units if unit.startswith(path)]


def _check_values(model: nn.Module) -> None:
    """Raises ConfigError for tensors that are neither parameters nor buffers: they would lose their values on meta."""
    for path, module in model.named_modules():
        for name, one in vars(module).items():
            if isinstance(one, torch.Tensor):
                raise ConfigError(
                    f"hf: {type(module).__name__} keeps the tensor {f'{path}.{name}'!r}, which is not a buffer, so it "
                    "can't be built on the meta device."
                )


def _forget(model: nn.Module) -> None:
    """Remove tensors that modules kept from the run on the meta device, such as rotary tables of long sequences."""
    for module in model.modules():
        for name in [name for name, one in vars(module).items() if isinstance(one, torch.Tensor)]:
            delattr(module, name)


def _random(name: str) -> bool:
    """Return True if a value with this name enables random numbers: dropout, or noise in routing."""
    return "drop" in name or "jitter" in name


def _watched_dropout(model: nn.Module) -> dict[str, list[torch.Size]]:
    """Path of each dropout module → the shapes it is called with, recorded from now on."""
    found: dict[str, list[torch.Size]] = {}
    for path, module in model.named_modules():
        if type(module) is nn.Dropout and module.p:
            shapes = found[path] = []
            module.register_forward_pre_hook(lambda _, args, own=shapes: own.append(args[0].shape))
    return found


def _swap_dropout(model: nn.Module, calls: Mapping[str, list[torch.Size]], job: Job) -> None:
    """Replace dropout modules by Forge's dropout, whose masks are the same on every layout. A module that is called
    twice is kept, because both calls would have the same mask."""
    for path, shapes in calls.items():
        if [shape[:-1] for shape in shapes] == [(1, _PROBED)]:
            parent, _, name = path.rpartition(".")
            rate = cast(nn.Dropout, model.get_submodule(path)).p
            setattr(model.get_submodule(parent), name, Dropout(rate, job, path))


def _check_dropout(model: Any) -> None:
    """Raises ConfigError if the class uses dropout or noise, whose random numbers depend on the layout."""
    dropping = set()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            dropping.add(float(module.p))
        dropping |= {float(one) for name, one in vars(module).items() if _random(name) and isinstance(one, float)}
    if not any(dropping):
        return
    found = {
        ".".join((*inside, key)): one for inside, table in _tables(model.config.to_dict()) for key, one in table.items()
    }
    keys = [f"hf.set.{key} = 0.0" for key, one in found.items() if _random(key) and one and one in dropping]
    raise ConfigError(
        f"hf: {type(model).__name__} uses random numbers that differ between layouts; switch them off: "
        f"{format_list(keys, 8)}."
    )


def _tables(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """A configuration and those inside it, each with its keys there."""
    yield (), {key: one for key, one in table.items() if not isinstance(one, (Mapping, list))}
    for key, one in table.items():
        if isinstance(one, Mapping) and "model_type" in one:
            yield from (((key, *inside), below) for inside, below in _tables(one))

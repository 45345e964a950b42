"""Translates experts between a `config.json` and `[moe]`, and reads the layouts in which files store them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forge_train_kit.state_map import Rename, Split, Stack, StateMap, Together

from .family import ACTIVATIONS, Key, Part, Sections
from .reader import Reader

if TYPE_CHECKING:
    from ...decoder import Decoder

NEUTRAL = ("balance", "balance_over", "z_loss", "capacity", "jitter", "matmul", "metrics")
"""Options of `[moe]` that change no output of a trained model."""
BALANCE = "router_aux_loss_coef"
DENSE = ("first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step")
"""Keys that say which layers are dense."""
ACTS = {theirs: ours for theirs, ours in ACTIVATIONS.items() if ours in ("swiglu", "geglu", "reglu")}
"""`hidden_act` → `moe.activation`."""


def part(
    keys: Mapping[str, Key],
    options: Mapping[str, Any],
    *,
    fixed: Mapping[str, Any] | None = None,
    balance: float = 0.001,
    read_more: Callable[[Reader, int], dict[str, Any]] = lambda config, count: {},
    write_more: Callable[[Any, int], dict[str, Any]] = lambda section, count: {},
) -> Part:
    """The experts of a family.

    Args:
        keys: keys of the file, each of which sets options of `[moe]`.
        options: options that all models of the family share.
        fixed: keys that can have only this value.
        balance: weight of the load-balancing loss if the file gives none.
        read_more: reads options that depend on several keys, given the number of layers.
        write_more: writes these keys.
    """

    def read(config: Reader, sections: Sections) -> dict[str, Any]:
        section: dict[str, Any] = dict(options)
        for name, key in keys.items():
            section |= key.read(config, name)
        for name, value in (fixed or {}).items():
            if config.get(name, value) != value:
                config.refuse(name, f"expected {value!r}")
        section.setdefault("activation", sections["swiglu"]["activation"])
        if "activation" not in options and section["activation"] not in ACTS.values():
            config.refuse("hidden_act", f"experts support {', '.join(ACTS)}")
        if "balance" not in section:  # with even loads, the loss is 1 here and `top_k` there
            section["balance"] = short(config.number(BALANCE, balance) * section["top_k"])
        section |= read_more(config, sections["decoder"]["layers"])
        layers = sections["decoder"]["layers"]
        if not [*range(section.get("dense_first", 0), layers)][section.get("every", 1) - 1 :: section.get("every", 1)]:
            dense = next((one for one in DENSE if config.table.get(one)), DENSE[0])
            config.refuse(dense, f"none of the {layers} layers would have experts, and this family needs them")
        _check_choice(config, section, next(name for name, key in keys.items() if "top_k" in key.options))
        return section

    def write(section: Any, decoder: Decoder.Config) -> dict[str, Any]:
        found = {name: key.theirs(getattr(section, key.options[0])) for name, key in keys.items()} | dict(fixed or {})
        if len(section.layers(decoder.layers)) == decoder.layers and "activation" not in options:
            found["hidden_act"] = next(theirs for theirs, ours in ACTS.items() if ours == section.activation)
        if not any("balance" in key.options for key in keys.values()):
            found[BALANCE] = short(section.balance / section.top_k)
        return found | write_more(section, decoder.layers)

    return Part("moe", read, write, NEUTRAL, _resolved)


def _check_choice(config: Reader, section: Mapping[str, Any], top_k: str) -> None:
    """Refuse an impossible choice: a folder can be opened without the checks of a training run."""
    experts, chosen = section["experts"], section["top_k"]
    groups, top_groups = section.get("groups", 1), section.get("top_groups", 1)
    if not 1 <= chosen <= experts:
        config.refuse(top_k, f"expected a number from 1 to the {experts} experts")
    if groups < 1 or experts % groups:
        config.refuse("n_group", f"expected a divisor of the {experts} experts")
    if not 1 <= top_groups <= groups or top_groups * (experts // groups) < chosen:
        config.refuse("topk_group", f"expected at most {groups} groups, with {chosen} experts between them")


def _resolved(section: Any, decoder: Decoder.Config) -> Any:
    """The section with all derived options filled in, so that equal models compare equal."""
    first, every = _pattern(section.layers(decoder.layers), decoder.layers) or (section.dense_first, section.every)
    width, speed = section.width(decoder.hidden), 0.001 * (section.bias_speed > 0)
    return replace(section, hidden=width, dense_first=first, every=every, bias_speed=speed)


def short(value: float) -> float:
    """The value without the rounding error of a product."""
    return float(f"{value:.12g}")


def _pattern(sparse: list[int], count: int) -> tuple[int, int] | None:
    """`moe.dense_first` and `moe.every` that give exactly these layers, if there are any."""
    pairs = ((first, every) for first in range(count) for every in range(1, count + 1))
    return next((pair for pair in pairs if [*range(pair[0], count)][pair[1] - 1 :: pair[1]] == sparse), None)


def read_sparse(config: Reader, count: int) -> dict[str, Any]:
    """Qwen's two keys: every n-th layer, except those in a list."""
    step, dense = config.integer("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    if step < 1:
        config.refuse("decoder_sparse_step", "expected a number greater than 0")
    if not isinstance(dense, list) or any(type(one) is not int for one in dense):
        config.refuse("mlp_only_layers", "expected a list of layers")
    sparse = [index for index in range(count) if (index + 1) % step == 0 and index not in dense]
    if not (found := _pattern(sparse, count)):
        key = "mlp_only_layers" if dense else "decoder_sparse_step"
        config.refuse(key, f"moe.dense_first and moe.every can't select the layers {sparse}")
    return {"dense_first": found[0], "every": found[1]}


def write_sparse(section: Any, count: int) -> dict[str, Any]:
    sparse = section.layers(count)
    return {"decoder_sparse_step": 1, "mlp_only_layers": [index for index in range(count) if index not in sparse]}


def tensors(
    *,
    block: str = "mlp",
    fused_block: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    router: Mapping[str, str] | None = None,
) -> Callable[[Decoder.Config], tuple[StateMap, ...]]:
    """Maps for routed experts: one by one, as published, and stacked, as transformers 5 holds them in memory.

    Args:
        block: where a layer has its routed experts.
        fused_block: the same for stacked experts.
        names: of one expert's projections: gate, up, down.
        router: tensor of the router there → here; by default its weight only.
    """
    to = "layers.{i}.feed_forward.routed"

    def routers(at: str) -> StateMap:
        return Rename({f"{at}.{theirs}": f"{to}.router.{ours}" for theirs, ours in (router or ROUTER).items()})

    at, fused = f"model.layers.{{i}}.{block}", f"model.layers.{{i}}.{fused_block}"
    each = Together(
        tuple(
            Stack(f"{at}.experts.{{e}}.{theirs}.weight", f"{to}.experts.{ours}")
            for ours, theirs in zip(("gate", "up", "down"), names, strict=True)
        )
    )
    stacked = Split(f"{fused}.experts.gate_up_proj", (f"{to}.experts.gate", f"{to}.experts.up"), dim=1)
    down = Rename({f"{fused}.experts.down_proj": f"{to}.experts.down"})
    maps = (each | routers(at), stacked | down | routers(fused))
    return lambda config: maps


ROUTER = {"gate.weight": "weight"}

"""Experts between a `config.json` and `[moe]`, and the layouts in which files have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forge_train.state_map import Rename, Split, Stack, StateMap, Together

from ....experts._moe.rules import hidden, layers
from .family import ACTIVATIONS, Key, Part, Sections
from .reader import Reader

if TYPE_CHECKING:
    from ....experts.moe import MoE
    from ...decoder import Decoder

NEUTRAL = (
    *("balance", "balance_over", "z_loss", "bias_speed", "capacity", "jitter"),
    *("matmul", "metrics"),
)
"""Options of `[moe]` that change no number of a trained model outside of training."""
GATES = ("swiglu", "geglu", "reglu")
"""The activations that experts have."""


def part(
    keys: Mapping[str, Key],
    options: Mapping[str, Any],
    *,
    loss: tuple[str, float],
    read_layers: Callable[[Reader, int], dict[str, int]] = lambda config, count: {},
    write_layers: Callable[[list[int], int], dict[str, Any]] = lambda sparse, count: {},
) -> Part:
    """Experts as a family writes them.

    Args:
        keys: of the file, each an option of `[moe]`.
        options: what all models of the family have.
        loss: the key with the weight of the load-balancing loss, and its value in a file that leaves it out.
        read_layers: which layers have experts, of so many.
        write_layers: the keys for it, from these layers.
    """

    def read(config: Reader, sections: Sections) -> dict[str, Any]:
        section: dict[str, Any] = dict(options)
        for name, key in keys.items():
            section |= key.read(config, name)
        section |= read_layers(config, sections["decoder"]["layers"])
        activation = section.setdefault("activation", sections["swiglu"]["activation"])
        if activation not in (*GATES, options.get("activation")):
            config.refuse(
                "hidden_act", f"experts have {', '.join(key for key, act in ACTIVATIONS.items() if act in GATES)}"
            )
        section["balance"] = _short(config.number(*loss) * section["top_k"])
        return section

    def write(section: MoE.Config, decoder: Decoder.Config) -> dict[str, Any]:
        sparse = layers(section, decoder.layers)
        found = {name: key.theirs(getattr(section, key.options[0])) for name, key in keys.items()}
        if len(sparse) == decoder.layers and "activation" not in options:
            found["hidden_act"] = next(key for key, act in ACTIVATIONS.items() if act == section.activation)
        return {
            **found,
            loss[0]: _short(section.balance / section.top_k),
            **write_layers(sparse, decoder.layers),
        }

    return Part("moe", read, write, NEUTRAL, _resolved)


def _resolved(section: MoE.Config, decoder: Decoder.Config) -> MoE.Config:
    """With everything filled in that follows from other options, so that equal models are equal."""
    first, every = _pattern(layers(section, decoder.layers), decoder.layers) or (section.dense_first, section.every)
    return replace(section, hidden=hidden(section, decoder.hidden), dense_first=first, every=every)


def _short(value: float) -> float:
    """Without what rounding leaves of a product."""
    return float(f"{value:.12g}")


def _pattern(sparse: list[int], count: int) -> tuple[int, int] | None:
    """`moe.dense_first` and `moe.every` that give exactly these layers, if any do."""
    pairs = ((first, every) for first in range(count) for every in range(1, count + 1))
    return next((pair for pair in pairs if [*range(pair[0], count)][pair[1] - 1 :: pair[1]] == sparse), None)


def read_sparse(config: Reader, count: int) -> dict[str, int]:
    """Qwen's two keys: every n-th layer, without those of a list."""
    step, dense = config.integer("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    if step < 1:
        config.refuse("decoder_sparse_step", "expected a number greater than 0")
    if not isinstance(dense, list) or any(type(one) is not int for one in dense):
        config.refuse("mlp_only_layers", "expected a list of layers")
    sparse = [index for index in range(count) if (index + 1) % step == 0 and index not in dense]
    if not (found := _pattern(sparse, count)):
        key = "mlp_only_layers" if dense else "decoder_sparse_step"
        config.refuse(key, f"no moe.dense_first and moe.every give experts to the layers {sparse}")
    return {"dense_first": found[0], "every": found[1]}


def write_sparse(sparse: list[int], count: int) -> dict[str, Any]:
    return {"decoder_sparse_step": 1, "mlp_only_layers": [index for index in range(count) if index not in sparse]}


def tensors(
    *,
    block: str = "mlp",
    fused_block: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    router: Mapping[str, str] | None = None,
) -> Callable[[Decoder.Config], tuple[StateMap, ...]]:
    """Routed experts as published, one by one, and as transformers 5 has them in memory, stacked.

    Args:
        block: the place of routed experts in a layer.
        fused_block: the same where they are stacked.
        names: of the projections of one expert: gate, up, down.
        router: tensor of the router there → here; its weight by default.
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

"""A family as a table: how each key of its `config.json` maps to sections, and how it names tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge_train_kit.state_map import Rename

from . import by_length
from .positions import LLAMAS, Rotation, Windows, layer_types, repeating
from .reader import NEUTRAL, REQUIRED, Reader

if TYPE_CHECKING:
    from forge_train_kit.state_map import StateMap

    from ...decoder import Decoder

Sections = Mapping[str, Mapping[str, Any]]
"""Plugin → options."""

ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}
"""`hidden_act` → `swiglu.activation`; all families here use gated activations."""
BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
"""Module in a layer → its name in Llama's layout."""
OUTER = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


@dataclass(frozen=True)
class Key:
    """A key of `config.json`.

    Args:
        options: the options of `[decoder]` that it sets, all to the same value.
        kind: int, float or bool.
        missing: its value if the file leaves it out.
        null: its value if the file has null; same as `missing` by default.
        ours: turns the key's value into the option's.
        theirs: the inverse of `ours`.
        positive: whether a value in the file must be greater than 0.
    """

    options: tuple[str, ...]
    kind: type = int
    missing: Any = REQUIRED
    null: Any = REQUIRED
    ours: Callable[[Any], Any] = lambda value: value
    theirs: Callable[[Any], Any] = lambda value: value
    positive: bool = False

    def read(self, config: Reader, key: str) -> dict[str, Any]:
        readers: dict[type, Callable[[str, Any], Any]] = {
            int: config.integer,
            float: config.number,
            bool: config.flag,
        }
        if self.null is not REQUIRED and key in config.table and config.table[key] is None:
            config.skip(key)
            return dict.fromkeys(self.options, self.null)
        found = readers[self.kind](key, self.missing)
        if self.positive and config.table.get(key) is not None and found <= 0:
            config.refuse(key, "expected a number greater than 0")
        return dict.fromkeys(self.options, self.ours(found))


COMMON = {
    "hidden_size": Key(("dim",)),
    "num_hidden_layers": Key(("layers",)),
    "num_attention_heads": Key(("heads",)),
    "intermediate_size": Key(("hidden",)),
    "vocab_size": Key(("vocabulary",)),
    "max_position_embeddings": Key(("max_sequence",)),
    "rms_norm_eps": Key(("norm_eps",), float, 1e-6),
    "initializer_range": Key(("std",), float, 0.02, ours=lambda std: std or 0.02),
    "tie_word_embeddings": Key(("tied",), bool, False),
    "attention_dropout": Key(("attention_dropout",), float, 0.0),
}
"""Keys of every family."""
ATTENTION_BIAS = {"attention_bias": Key(("qkv_bias", "o_bias"), bool, False)}
MLP_BIAS = {"mlp_bias": Key(("bias",), bool, False)}


def soft_cap(option: str, missing: float | None) -> Key:
    """A soft cap; null means none."""
    return Key((option,), float, missing or 0.0, null=0.0, theirs=lambda cap: cap or None, positive=True)


@dataclass(frozen=True)
class Part:
    """The options of a plugin besides `decoder` and `swiglu` that a family's models need; an import enables the plugin.

    Args:
        plugin: its name.
        read: makes its section from the file and the sections read so far.
        write: makes keys of the file from its section and the decoder's.
        neutral: options of it that change no output of a trained model.
        resolved: fills in all derived options of a section.
    """

    plugin: str
    read: Callable[[Reader, Sections], dict[str, Any]]
    write: Callable[[Any, Decoder.Config], dict[str, Any]]
    neutral: tuple[str, ...] = ()
    resolved: Callable[[Any, Decoder.Config], Any] = lambda section, decoder: section


@dataclass(frozen=True)
class Family:
    """Models of one architecture of transformers.

    Args:
        architecture: its class in transformers.
        model_type: its `model_type`.
        options: options of `[decoder]` that all its models share; a function is called with the section read so far.
        keys: keys that add to `COMMON` or replace some of these.
        kv_heads: `num_key_value_heads` if the file leaves it out; as many as heads by default.
        head_dim: the same for `head_dim`; `hidden_size` / heads by default.
        activation: the key that names the activation.
        act: its value if the file leaves it out.
        rotation: how positions are written; None for a family without rotary positions.
        windows: how sliding windows are written; None for a family without windows.
        block: module in a layer → its name in the family's layout.
        by_sections: further such names, which depend on the sections of other parts.
        ahead: the same for the model's tail, whose layers the family stores after the last one; empty if it has no
            tail.
        ignored: keys that transformers ignores.
        parts: other plugins that its models need.
        outer: module outside layers → its name in the family's layout.
        layers: where the family has its layers.
        tensors: for a given decoder, maps from its layout to forge's parameters, for tensors that need more than a new
            name. Exports use the first; files in the layouts of the others can be read too.
        leftovers: patterns of tensors that files may hold in addition to the decoder's.
        common: keys of every family, unless this family names them differently.
        grouped: whether there may be fewer key and value heads, and heads of another width than `hidden_size` / heads.
        activations: `hidden_act` → `swiglu.activation`.
        fixed: keys that an export writes in addition, with their values.
        exact: patterns of tensors that are never stored in a narrower dtype.
        unused: options of `[decoder]` that have no effect on its models.
        spellings: other names of keys → the names used here.
    """

    architecture: str
    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Key] = field(default_factory=dict)
    kv_heads: int | None = None
    head_dim: int | None = None
    activation: str = "hidden_act"
    act: str = "silu"
    rotation: Rotation | None = LLAMAS
    windows: Windows | None = None
    block: Mapping[str, str] = field(default_factory=lambda: BLOCK)
    ignored: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    layers: str = "model.layers"
    tensors: Callable[[Decoder.Config], tuple[StateMap, ...]] = lambda config: ()
    leftovers: Callable[[Decoder.Config], tuple[str, ...]] = lambda config: ()
    common: Mapping[str, Key] = field(default_factory=lambda: COMMON)
    grouped: bool = True
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    fixed: Mapping[str, Any] = field(default_factory=lambda: {"use_cache": True})
    exact: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    spellings: Mapping[str, str] = field(default_factory=dict)
    by_sections: Callable[[Sections], Mapping[str, str]] = lambda sections: {}
    ahead: Mapping[str, str] = field(default_factory=dict)

    def read(self, table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The sections `[decoder]`, `[swiglu]`, and those of the other parts.

        Raises:
            ConfigError: naming the keys whose values have no counterpart.
        """
        config = Reader(table, neutral=NEUTRAL)
        for other, usual in self.spellings.items():
            if other in table and table.get(usual, table[other]) != table[other]:
                config.refuse(other, f"it contradicts {usual}")
        table = {self.spellings.get(name, name): value for name, value in table.items()}
        config = Reader(table, neutral=NEUTRAL)
        config.skip(*self.ignored)
        if len(config.get("architectures", [self.architecture])) != 1:
            config.refuse("architectures", "expected one")
        if config.get("model_type", self.model_type) != self.model_type:
            config.refuse("model_type", f"{self.architecture} is {self.model_type!r}")
        decoder: dict[str, Any] = {}
        for name, key in {**self.common, **self.keys}.items():
            decoder |= key.read(config, name)
        self._read_heads(config, decoder)
        if decoder.get("scale") == decoder["head_dim"] ** -0.5:
            del decoder["scale"]
        decoder |= {name: one(decoder) if callable(one) else one for name, one in self.options.items()}
        window, which = 0, (False,) * decoder["layers"]
        if self.windows is not None:
            window, which = self.windows.read(config, decoder["layers"])
        else:
            layer_types(config, which, fixed=True)
        if any(which):
            decoder |= {"window": window, "window_layers": repeating(which)}
        decoder["rope"] = self.rotation.read(config, decoder["layers"], which) if self.rotation else {}
        decoder["max_sequence"] = by_length.max_sequence(decoder)
        activation = config.one_of(self.activation, self.activations, self.act)
        sections = {"decoder": decoder, "swiglu": {"activation": activation}}
        for part in self.parts:
            sections[part.plugin] = part.read(config, sections)
        config.refuse_the_rest()
        return sections

    def tied(self, table: Mapping[str, Any]) -> bool:
        """Return True if a causal model of this `config.json` shares the weights of embedding and head."""
        name = "tie_word_embeddings"
        return bool({**self.common, **self.keys}[name].read(Reader(table), name)["tied"])

    def _read_heads(self, config: Reader, decoder: dict[str, Any]) -> None:
        heads = decoder["heads"]
        decoder["kv_heads"] = heads
        if self.grouped:
            absent = self.kv_heads is not None and "num_key_value_heads" not in config.table
            decoder["kv_heads"] = self.kv_heads if absent else config.integer("num_key_value_heads", heads)
            config.skip("num_key_value_heads")
        if "head_dim" not in decoder:
            width = self.head_dim or decoder["dim"] // max(heads, 1)
            if self.head_dim and config.table.get("head_dim", self.head_dim) is None:
                config.refuse("head_dim", "expected an integer")
            decoder["head_dim"] = config.integer("head_dim", width) if self.grouped else width

    def write(self, config: Decoder.Config, activation: str, sections: Mapping[str, Any]) -> dict[str, Any]:
        """The `config.json` of a model with these options, or of the closest model that the family can express.

        Args:
            config: with all derived options filled in.
            activation: of `[swiglu]`.
            sections: those of the family's other parts.
        """
        acts = {ours: theirs for theirs, ours in self.activations.items()}
        found: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for name, key in {**self.common, **self.keys}.items():
            found[name] = key.theirs(getattr(config, key.options[0]))
        if self.grouped:
            found["num_key_value_heads"] = config.kv_heads
        if self.grouped and not any("head_dim" in key.options for key in self.keys.values()):
            found["head_dim"] = config.head_dim
        found |= {self.activation: acts.get(activation, self.act), **self.fixed}
        found |= self.rotation.write(config) if self.rotation else {}
        for part in self.parts:
            found |= part.write(sections[part.plugin], config)
        return found | (self.windows.write(config) if self.windows is not None else {})

    def maps(self, config: Decoder.Config, sections: Sections, ahead: int = 0) -> tuple[StateMap, ...]:
        """Maps to this decoder's parameters: from the family's layout, and from others that files may have.

        Args:
            config: of the decoder.
            sections: those of other parts.
            ahead: number of layers in its tail.
        """
        block = {**self.block, **self.by_sections(sections)}
        outer = {ours: theirs for ours, theirs in self.outer.items() if not (config.tied and ours == "head")}
        names = {f"{theirs}.{{kind}}": f"{ours}.{{kind}}" for ours, theirs in outer.items()}
        inner = {f"{self.layers}.{{i}}.{theirs}": f"layers.{{i}}.{ours}" for ours, theirs in block.items()}
        renamed = Rename(names | {f"{theirs}.{{kind}}": f"{ours}.{{kind}}" for theirs, ours in inner.items()})
        maps = tuple(renamed | other for other in self.tensors(config)) or (renamed,)
        return tuple(self._with_tail(one, config.layers, ahead) for one in maps) if self.ahead and ahead else maps

    def _with_tail(self, one: StateMap, first: int, ahead: int) -> StateMap:
        """Extend a map to the layers of a tail, which the family numbers from `first` on."""
        own = {
            f"{self.layers}.{first + at}.{theirs}.{{kind}}": f"tail.layers.{at}.{ours}.{{kind}}"
            for at in range(ahead)
            for ours, theirs in self.ahead.items()
        }
        layers = {f"layers.{first + at}.{{inner*}}": f"tail.layers.{at}.layer.{{inner*}}" for at in range(ahead)}
        return (one | Rename(own)) >> Rename(layers)

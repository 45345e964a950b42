"""A family as a table: what each key of its `config.json` is in sections, and how it names tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge_train.state_map import Rename

from . import by_length
from .positions import LLAMAS, Rotation, Windows, layer_types, repeating
from .reader import NEUTRAL, REQUIRED, Reader

if TYPE_CHECKING:
    from forge_train.state_map import StateMap

    from ...decoder import Decoder

Sections = Mapping[str, Mapping[str, Any]]
"""Plugin → options."""

ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}
"""`hidden_act` → `swiglu.activation`; all families here gate."""
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
        options: of `[decoder]` that it sets, all to the same value.
        kind: int, float or bool.
        missing: its value in a file that leaves it out.
        null: its value where the file says null; as `missing` by default.
        ours: the option's value from the key's.
        theirs: the way back.
        positive: whether the file must say a number greater than 0.
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
    """A cap that null leaves out."""
    return Key((option,), float, missing or 0.0, null=0.0, theirs=lambda cap: cap or None, positive=True)


@dataclass(frozen=True)
class Part:
    """What the models of a family have of a plugin beside `decoder` and `swiglu`; an import enables it.

    Args:
        plugin: its name.
        read: its section, from the file and the sections read so far.
        write: keys of the file, from its section and that of the decoder.
        neutral: options of it that change no number of a trained model.
        resolved: a section with everything filled in that follows from other options.
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
        architecture: its class there.
        model_type: its `model_type`.
        options: of `[decoder]` that all its models have; a function is called with the section read so far.
        keys: beside `COMMON`, or in the place of one of these.
        kv_heads: `num_key_value_heads` of a file that leaves it out; as many as heads by default.
        head_dim: the same for `head_dim`; `hidden_size` / heads by default.
        activation: the key that names it.
        act: its value in a file that leaves it out.
        rotation: how positions are written; None for a family that rotates nothing.
        windows: how sliding windows are written; a family without has none.
        block: module in a layer → its name in the family's layout.
        by_sections: those of such names that go by the sections of other parts.
        ahead: the same for a model's tail, whose layers the family has after the last one; empty if it has none.
        ignored: keys that transformers does not look at.
        parts: other plugins that its models need.
        outer: module outside layers → its name in the family's layout.
        layers: where the family has its layers.
        tensors: maps from its layout to forge's parameters, for a decoder like this: those of tensors that are not only
            renamed. The first is what is written; files in the layouts of the others are read too.
        leftovers: patterns of tensors that files may hold beside a decoder's like this.
        common: keys of every family, unless it names them otherwise.
        grouped: whether keys and values may have fewer heads, and heads other widths than `hidden_size` / heads.
        activations: `hidden_act` → `swiglu.activation`.
        fixed: keys that a file is given beside those.
        exact: patterns of tensors that are never stored in a narrower dtype.
        unused: options of `[decoder]` that make no difference to its models.
        spellings: other names of keys → those that are read and written here.
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
        """The sections `[decoder]`, `[swiglu]`, and those of other parts.

        Raises:
            ConfigError: naming the keys whose values have no counterpart.
        """
        config = Reader(table, neutral=NEUTRAL)
        for other, usual in self.spellings.items():
            if other in table and table.get(usual, table[other]) != table[other]:
                config.refuse(other, f"{usual} says something else")
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
        """The `config.json` of a model with these options, or of one that is as near as the family has.

        Args:
            config: with everything that follows from other options filled in.
            activation: of `[swiglu]`.
            sections: of the family's other parts.
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
        """From the family's layout, and from others that files may have, to the parameters of a decoder like this.

        Args:
            config: of the decoder.
            sections: of other parts.
            ahead: layers of its tail.
        """
        block = {**self.block, **self.by_sections(sections)}
        outer = {ours: theirs for ours, theirs in self.outer.items() if not (config.tied and ours == "head")}
        names = {f"{theirs}.{{kind}}": f"{ours}.{{kind}}" for ours, theirs in outer.items()}
        inner = {f"{self.layers}.{{i}}.{theirs}": f"layers.{{i}}.{ours}" for ours, theirs in block.items()}
        renamed = Rename(names | {f"{theirs}.{{kind}}": f"{ours}.{{kind}}" for theirs, ours in inner.items()})
        maps = tuple(renamed | other for other in self.tensors(config)) or (renamed,)
        return tuple(self._with_tail(one, config.layers, ahead) for one in maps) if self.ahead and ahead else maps

    def _with_tail(self, one: StateMap, first: int, ahead: int) -> StateMap:
        """A map that also finds the layers of a tail, as numbers from `first` on."""
        own = {
            f"{self.layers}.{first + at}.{theirs}.{{kind}}": f"tail.layers.{at}.{ours}.{{kind}}"
            for at in range(ahead)
            for ours, theirs in self.ahead.items()
        }
        layers = {f"layers.{first + at}.{{inner*}}": f"tail.layers.{at}.layer.{{inner*}}" for at in range(ahead)}
        return (one | Rename(own)) >> Rename(layers)

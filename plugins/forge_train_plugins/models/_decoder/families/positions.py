"""Rotary positions and sliding windows between a `config.json` and `[decoder]`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import rules
from . import by_length
from .reader import Reader

if TYPE_CHECKING:
    from ...decoder import Decoder, Rope

SCALINGS = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "dynamic": "dynamic",
    "longrope": "longrope",
}
"""`rope_type` → `decoder.rope.scaling`."""
SECTIONS = "mrope_section"
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Rotation:
    """Positions in a family's `config.json`.

    Args:
        theta: `rope_theta` if the file gives none.
        window_theta: the same for layers with a window, if these have a rotation of their own, without a scaling.
        window_key: the key for `window_theta`, next to `rope_theta`.
        skipping: `no_rope_layers` names layers without positions.
        partial: `partial_rotary_factor` may leave some features of each head unrotated.
        sections: `mrope_section` may rotate by three axes (Qwen2-VL).
        types: `rope_type` → `decoder.rope.scaling`.
        original: `original_max_position_embeddings` if the file leaves it out; `max_position_embeddings` by default.
        scaled: the scaling's table if the file has none.
    """

    theta: float = 10_000.0
    window_theta: float | None = None
    window_key: str = ""
    skipping: bool = False
    partial: bool = False
    sections: bool = False
    types: Mapping[str, str] = field(default_factory=lambda: SCALINGS)
    original: int = 0
    scaled: Mapping[str, Any] = field(default_factory=dict)

    def read(self, config: Reader, layers: int, windows: tuple[bool, ...]) -> dict[str, Any]:
        """The section `[decoder.rope]`."""
        if self.window_theta is None:
            found = self._rotation(_table(config, self.scaled), config, config.number("rope_theta", self.theta))
        else:
            found = self._read_two(config, any(windows))
        return {**found, "layers": repeating(self.with_positions(config, layers))} if self.skipping else found

    def _read_two(self, config: Reader, windows: bool) -> dict[str, Any]:
        theta, own = config.number("rope_theta", self.theta), float(self.window_theta or 0)
        if self.window_key:
            own = config.number(self.window_key, own)
        given = config.get("rope_parameters", {})
        if not given:
            found = self._rotation(_table(config), config, theta)
        elif not isinstance(given, Mapping) or given.keys() - {FULL, SLIDING}:
            config.refuse("rope_parameters", f"expected a table for each of {FULL} and {SLIDING}")
        elif config.get("rope_scaling", None):
            config.refuse("rope_scaling", "the file also has rope_parameters; keep only one of them")
        else:
            of_each = {kind: _nested(config, given, kind) for kind in (FULL, SLIDING)}
            found = self._rotation(of_each[FULL], config, theta)
            sliding = self._rotation(of_each[SLIDING], config, own)
            own = sliding.pop("theta")
            if sliding:
                config.refuse("rope_parameters", "layers with a window can't have a scaling")
        same = own == found["theta"] and "scaling" not in found
        return found if same or not windows else {**found, "window_theta": own}

    def with_positions(self, config: Reader, layers: int) -> tuple[bool, ...]:
        """Read which layers have positions; in `no_rope_layers`, 1 means that a layer has."""
        interval = config.integer("no_rope_layer_interval", 4)
        if interval < 1:
            config.refuse("no_rope_layer_interval", "expected a number greater than 0")
        every = tuple((index + 1) % interval != 0 for index in range(layers))
        return config.flags("no_rope_layers", layers, every)

    def write(self, config: Decoder.Config) -> dict[str, Any]:
        """The keys as before transformers 5, which every reader understands; the new ones only if no old key exists."""
        rope = config.rope
        scaling = _scaling(rope) or ({"rope_type": "default"} if self.scaled or rope.sections else None)
        if self.sections and rope.sections:
            scaling = {**(scaling or {}), SECTIONS: list(rope.sections)}
        own = rope.window_theta or rope.theta
        if self.window_theta is None or self.window_key:
            found: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": scaling}
            found |= {self.window_key: own} if self.window_key else {}
        else:
            full = {"rope_theta": rope.theta, **(scaling or {"rope_type": "default"})}
            found = {"rope_parameters": {FULL: full, SLIDING: {"rope_theta": own, "rope_type": "default"}}}
        if self.skipping:
            found["no_rope_layers"] = [int(one) for one in rules.rotated(config)]
        if self.partial:
            found["partial_rotary_factor"] = rope.fraction
        return found | by_length.outer(config)

    def _rotation(self, given: Reader, config: Reader, theta: float) -> dict[str, Any]:
        """One rotation, from transformers 5's `rope_parameters` or from the older keys."""
        rope: dict[str, Any] = {"theta": given.number("rope_theta", theta)}
        kind = given.one_of("rope_type" if "rope_type" in given.table else "type", self.types, "default")
        if given.table.get("type", given.table.get("rope_type")) != given.table.get(
            "rope_type", given.table.get("type")
        ):
            given.refuse("type", "it contradicts rope_type")
        given.skip("type", "rope_type")
        if kind in ("dynamic", "longrope"):
            rope |= {"scaling": kind, **by_length.read(kind, given, config, self.original)}
        elif kind != "none":
            rope |= {"scaling": kind, "factor": given.number("factor")}
        if kind in ("llama3", "yarn"):
            length = config.integer("max_position_embeddings")
            rope["original_sequence"] = given.integer("original_max_position_embeddings", length)
        if kind == "llama3":
            rope |= {"low": given.number("low_freq_factor"), "high": given.number("high_freq_factor")}
        if kind == "yarn":
            rope |= {
                "low": given.number("beta_slow", 1),
                "high": given.number("beta_fast", 32),
                "temperature": _temperature(given, rope["factor"]),
                "truncate": given.flag("truncate", True),
            }
        fraction = config.number("partial_rotary_factor", 1) if self.partial else 1
        if (fraction := given.number("partial_rotary_factor", fraction)) != 1:
            if not self.partial:
                given.refuse("partial_rotary_factor", "this family rotates all features")
            rope["fraction"] = fraction
        if self.sections and (sections := given.get(SECTIONS, None)):
            rope["sections"] = tuple(sections)
        given.refuse_the_rest()
        return rope


LLAMAS = Rotation()


@dataclass(frozen=True)
class Windows:
    """Sliding windows in a family's `config.json`.

    Args:
        which: the layers with a window, if `layer_types` is missing.
        missing: the window if the file gives none.
        switch: windows apply only if `use_sliding_window` is true.
        listed: `layer_types` decides which layers have a window.
    """

    which: Callable[[Reader, int], tuple[bool, ...]]
    missing: int | None = 4096
    switch: bool = False
    listed: bool = True

    def read(self, config: Reader, layers: int) -> tuple[int, tuple[bool, ...]]:
        """The window, and which layers have it."""
        window = config.table.get("sliding_window", self.missing)
        if self.switch and not config.flag("use_sliding_window", False):  # then transformers ignores both keys
            config.skip("sliding_window", "max_window_layers")
            window = None
        elif window is not None:
            window = config.integer("sliding_window", self.missing)
            if window < 1 and not self.listed:  # transformers then masks every key
                config.refuse("sliding_window", "expected a number greater than 0, or null")
        some = bool(window) or (self.listed and not self.switch)
        which = self.which(config, layers) if some else (False,) * layers
        which = layer_types(config, which, fixed=not self.listed)
        if any(which) and (not window or window < 1):
            config.refuse("sliding_window", f"{SLIDING} needs a window in tokens")
        config.skip("sliding_window")
        return window or 0, which

    def write(self, config: Decoder.Config) -> dict[str, Any]:
        which = [window > 0 for window in rules.windows(config)]
        found: dict[str, Any] = {"sliding_window": config.window or None}
        if self.listed:
            found["layer_types"] = [SLIDING if one else FULL for one in which]
        if self.switch:
            found["use_sliding_window"] = any(which)
        return found


def layer_types(config: Reader, default: tuple[bool, ...], *, fixed: bool) -> tuple[bool, ...]:
    """Read from `layer_types` which layers have a window.

    Args:
        config: the model's.
        default: the value if the key is missing.
        fixed: the default is the only allowed value.
    """
    expected = [SLIDING if one else FULL for one in default]
    found = config.get("layer_types", expected)
    if fixed and found != expected:
        kinds = " and ".join(map(repr, dict.fromkeys(expected)))
        config.refuse("layer_types", f"expected {len(expected)} times {kinds}")
    if not isinstance(found, list) or len(found) != len(expected) or not {*found} <= {SLIDING, FULL}:
        config.refuse("layer_types", f"expected {len(expected)} of {FULL!r} and {SLIDING!r}")
    return tuple(one == SLIDING for one in found)


def repeating(which: tuple[bool, ...]) -> tuple[bool, ...]:
    """The shortest list whose repetition gives this one; empty if all entries are true."""
    if all(which):
        return ()
    sizes = (size for size in range(1, len(which)) if all(one == which[at % size] for at, one in enumerate(which)))
    return which[: next(sizes, len(which))]


def _table(config: Reader, missing: Mapping[str, Any] | None = None) -> Reader:
    """The only table that describes the rotation; `missing`, or an empty one, if the file has none."""
    tables = {key: config.get(key, {}) for key in ("rope_scaling", "rope_parameters")}
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            config.refuse(key, "expected a table")
    if all(tables.values()):
        config.refuse("rope_scaling", "the file also has rope_parameters; keep only one of them")
    key = "rope_scaling" if tables["rope_scaling"] else "rope_parameters"
    return Reader(tables[key] or missing or {}, f"{key}.")


def _nested(config: Reader, given: Mapping[str, Any], kind: str) -> Reader:
    table = given.get(kind) or {}
    if not isinstance(table, Mapping):
        config.refuse("rope_parameters", f"expected a table for {kind}")
    return Reader(table, f"rope_parameters.{kind}.")


def _temperature(given: Reader, factor: float) -> float:
    """YaRN's factor on cos and sin; DeepSeek's two “mscale” keys give it as a ratio. 0 means the paper's."""
    over, under = given.number("mscale", 0.0), given.number("mscale_all_dim", 0.0)
    if given.get("attention_factor", None) is not None:
        if (found := given.number("attention_factor")) <= 0:
            given.refuse("attention_factor", "expected a number greater than 0")
        return found
    if over and under and factor > 1:
        return (0.1 * over * math.log(factor) + 1) / (0.1 * under * math.log(factor) + 1)
    return 0.0


def _scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    if rope.scaling in ("dynamic", "longrope"):
        return by_length.write(rope)
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = rope.original_sequence
    if rope.scaling == "llama3":
        return scaling | {"low_freq_factor": rope.low, "high_freq_factor": rules.high(rope)}
    scaling |= {"beta_slow": rope.low, "beta_fast": rules.high(rope), "truncate": rope.truncate}
    return scaling | ({"attention_factor": rope.temperature} if rope.temperature else {})

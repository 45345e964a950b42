"""Reads a folder in Hugging Face layout: `config.json`, and ranges of tensors in safetensors files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forge_train.base.errors import ConfigError, describe
from forge_train.base.files import load_json, regular_size
from forge_train.base.format import format_list
from forge_train.base.strict_json import parse_json
from forge_train.store.shards import whole
from forge_train_kit.model_files import ITEMS, OF_KIND, files

from ..foreign import advice
from ..format import format_lines
from ..full_tensors import INDEX
from ..lfs import check_pointer
from ..state_map import Box

CONFIG, SINGLE = "config.json", "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of stored weights."""
PACKED = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}
"""Dtypes of quantised weights and their scales; a state map makes weights from them."""
_LARGEST = 64 << 20
"""The most bytes of JSON to read."""

COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Keys of a `config.json` that count layers; each layer has at least one tensor."""
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
)
"""Keys of a `config.json` that give the size of a dimension of some tensor."""
_QUANTISED = (".qweight", ".qzeros", ".SCB", ".absmax", ".weight_packed", ".weight_scale")
"""Endings of the names of quantised weights, or of their scales."""
_DOWNLOAD = " Download the weights too."
HARMLESS = 10_000
"""A size that any machine can handle, even if no tensor is that large."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Folder:
    """A folder opened for reading; no tensor is in memory."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Entry] = field(default_factory=dict)
    _opened: dict[Path, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Read the model's description and the header of every file.

        Raises:
            ConfigError: naming what is missing or can't be read.
        """
        if not path.is_dir():
            what = "not a folder" if path.exists() else "there is no such folder"
            raise ConfigError(f"{path}: {what}.{advice(path)}")
        if not (path / CONFIG).is_file():
            raise ConfigError(f"{path}: not a model in Hugging Face layout: there is no {CONFIG}.{advice(path)}")
        for file in files(path).values():
            check_pointer(file)
        config = table(path / CONFIG)
        named = config.get("architectures") or []
        if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
            raise ConfigError(f"{path / CONFIG}: architectures: expected a list of names, found {str(named)[:60]!r}.")
        if (path / INDEX).is_file():
            tensors = _indexed(path)
            if (path / SINGLE).is_file() and all(one.file.name != SINGLE for one in tensors.values()):
                raise ConfigError(
                    f"{path}: holds two sets of weights, {SINGLE} and the files that {INDEX} lists; transformers would "
                    "read the first. Remove the one that is not the model."
                )
            return cls(path, config, tensors)
        if (path / SINGLE).is_file():
            return cls(path, config, _header(path / SINGLE))
        for name in (SINGLE, INDEX):
            if (path / name).is_symlink() and not (path / name).exists():
                raise ConfigError(f"{path / name}: it is a link to a file that is not there; download it again.")
        raise ConfigError(f"{path}: found neither {SINGLE} nor {INDEX}.{advice(path) or _DOWNLOAD}")

    @property
    def beside(self) -> dict[str, Any]:
        """The contents of the files that describe how items are read; empty without any.

        That of `KIND_preprocessor_config.json` stands under `KIND_processor`, as in `processor_config.json`.
        """
        kinds = {path.name.removesuffix(OF_KIND): table(path) for path in sorted(self.path.glob(f"*{OF_KIND}"))}
        return {
            **{key: one for name in ITEMS if (path := self.path / name).is_file() for key, one in table(path).items()},
            **{f"{kind}_processor": one for kind, one in kinds.items()},
        }

    def check_sizes(self) -> None:
        """Check that the files are large enough for the described model.

        Raises:
            ConfigError: naming a size that is too large for the files; building such a model could fill the memory.
        """
        tensors, values = len(self.tensors), sum(math.prod(entry.shape) for entry in self.tensors.values())
        limits = {**dict.fromkeys(COUNTS, (tensors, "tensors")), **dict.fromkeys(SIZES, (values, "values"))}
        inner = [one for one in self.config.values() if isinstance(one, Mapping)]  # of the models that it consists of
        for key, found, (most, what) in (
            (key, one.get(key), limits[key]) for one in (self.config, *inner) for key in limits
        ):
            if isinstance(found, int) and found > max(most, HARMLESS):
                raise ConfigError(f"{self.path / CONFIG}: {key} is {found:,}, but the files hold only {most:,} {what}.")

    def quantised(self) -> str:
        """The line for an error about tensors that do not fit, if their names are those of quantised ones."""
        if not any(name.endswith(_QUANTISED) for name in self.tensors):
            return ""
        return (
            "\nThey are quantised in a way that is not read: take the model that they were made from, or dequantise it."
        )

    def odd(self, name: str) -> str:
        """The line for an error about a tensor whose dtype weights can't have."""
        return f"{name}: stored as {self.tensors[name].dtype}; expected one of {', '.join(DTYPES)}"

    def described(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor, as a state map expects them; leaves out dtypes that weights can't have."""
        known = DTYPES | PACKED
        return {name: (one.shape, known[one.dtype]) for name, one in self.tensors.items() if one.dtype in known}

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A tensor as it is stored, or a range of it; reads no other bytes."""
        file, shape = self.tensors[name].file, self.tensors[name].shape
        if file not in self._opened:
            self._opened[file] = safe_open(file, framework="pt")
        if box is None or box == whole(shape):  # mapped; a slice would be copied
            return self._opened[file].get_tensor(name)  # type: ignore[no-any-return]
        return self._opened[file].get_slice(name)[tuple(slice(*bounds) for bounds in box)]  # type: ignore[no-any-return]


def is_hugging_face(path: Path) -> bool:
    """Return True if a path is a folder in Hugging Face layout and not a checkpoint."""
    return (path / CONFIG).is_file() and not any((path / name).exists() for name in ("config.toml", "manifest.json"))


def table(file: Path) -> dict[str, Any]:
    """Read a JSON file.

    Raises:
        ConfigError: if it is not one, or has a key twice.
    """
    check_pointer(file)
    try:
        found = load_json(file, most=_LARGEST, links=True, unique=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: can't be read: {describe(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(found).__name__}.")
    return found


def _header(file: Path) -> dict[str, Entry]:
    check_pointer(file)
    try:
        regular_size(file, links=True)
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
            return {name: Entry(file, tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except (SafetensorError, OSError) as error:
        why = _cut_short(file) or f"{describe(error)}."
        raise ConfigError(f"{file}: not a whole safetensors file: {why} Download it again.") from error


def _cut_short(file: Path) -> str:
    """Describe which tensors a truncated file cuts off; empty if that is unknown."""
    try:
        size = regular_size(file, links=True)
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            table = parse_json(opened.read(length).decode()) if length <= min(size, _LARGEST) else {}
        ends = {name: 8 + length + one["data_offsets"][1] for name, one in table.items() if name != "__metadata__"}
        cut = sorted((name for name in ends if ends[name] > size), key=ends.__getitem__)
    except (OSError, ValueError, TypeError, LookupError, AttributeError):  # the header is not what it should be
        return ""
    needs = max(ends.values(), default=0)
    return f"it has {size:,} of {needs:,} bytes, and {format_list(cut)} {_are(cut)} cut off." if cut else ""


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _indexed(path: Path) -> dict[str, Entry]:
    """The tensors of several files; the index must list exactly what is in them."""
    index = table(path / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ConfigError(f"{path / INDEX}: has no weight_map from tensors to files.")
    found: dict[str, Entry] = {}
    wrong: list[str] = []
    for name in sorted(set(index.values())):
        if Path(name).name != name or not (path / name).is_file():
            wrong.append(f"{name}: no such file")
            continue
        inside = _header(path / name)
        listed = {tensor for tensor, file in index.items() if file == name}
        wrong += [f"{name}: {tensor} is not in it" for tensor in sorted(listed - inside.keys())]
        wrong += [f"{name}: {tensor} is in it, but not in the index" for tensor in sorted(inside.keys() - listed)]
        found |= inside
    if wrong:
        raise ConfigError(f"{path / INDEX} does not match the files:" + format_lines(wrong))
    return found

"""A model's folder in Hugging Face layout: `config.json`, and tensors in one or several safetensors files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forge_train.config.toml import Key
from forge_train.ground.errors import ConfigError, describe
from forge_train.ground.present import few
from forge_train.ground.untrusted import load_json, regular_size
from forge_train.storage.consolidated import INDEX, SHARD_BYTES, cut, header, size_of, write_index

CONFIG, SINGLE = "config.json", "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What weights can be stored as."""
_LARGEST = 64 << 20
"""Bytes of JSON that are read at most."""


COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Keys of a `config.json`: each layer has a tensor at least."""
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
)
"""Keys of a `config.json`: a tensor is as long, if there is one."""
HARMLESS = 10_000
"""A size that any machine can take, also where no tensor has it."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Folder:
    """A folder that was opened for reading; no tensor is in memory."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Entry] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Read what describes the model, and the header of every file.

        Raises:
            ConfigError: saying what is missing or can't be read.
        """
        if not path.is_dir():
            raise ConfigError(f"{path}: there is no such folder.")
        if not (path / CONFIG).is_file():
            raise ConfigError(f"{path}: not a model in Hugging Face layout: there is no {CONFIG}.")
        config = table(path / CONFIG)
        if (path / INDEX).is_file():
            return cls(path, config, _indexed(path))
        if (path / SINGLE).is_file():
            return cls(path, config, _header(path / SINGLE))
        others = sorted(file.name for pattern in ("*.bin", "*.safetensors") for file in path.glob(pattern))
        hint = f" There is {', '.join(others[:3])}; only safetensors files of these names are read." if others else ""
        raise ConfigError(f"{path}: there is neither {SINGLE} nor {INDEX}.{hint}")

    def check_sizes(self) -> None:
        """Whether the model that is described could be in the files.

        Raises:
            ConfigError: naming a size that can't be; a model of it would be built in memory.
        """
        tensors, values = len(self.tensors), sum(math.prod(entry.shape) for entry in self.tensors.values())
        limits = {**dict.fromkeys(COUNTS, (tensors, "tensors")), **dict.fromkeys(SIZES, (values, "values"))}
        for key, (most, what) in limits.items():
            found = self.config.get(key)
            if isinstance(found, int) and found > max(most, HARMLESS):
                raise ConfigError(f"{self.path / CONFIG}: {key} is {found:,}, and the files hold {most:,} {what}.")

    def read(self, name: str) -> Tensor:
        """A tensor, as it is stored."""
        with safe_open(self.tensors[name].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def table(file: Path) -> dict[str, Any]:
    """A file of JSON.

    Raises:
        ConfigError: if it is none.
    """
    try:
        found = load_json(file, most=_LARGEST, links=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: can't be read: {describe(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(found).__name__}.")
    return found


def _header(file: Path) -> dict[str, Entry]:
    try:
        regular_size(file, links=True)
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
            return {name: Entry(file, tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: not a whole safetensors file: {describe(error)}") from error


def _indexed(path: Path) -> dict[str, Entry]:
    """The tensors of several files; the index must say what is in them."""
    index = table(path / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ConfigError(f"{path / INDEX}: there is no weight_map of tensors to files.")
    found: dict[str, Entry] = {}
    wrong: list[str] = []
    for name in sorted(set(index.values())):
        if Path(name).name != name or not (path / name).is_file():
            wrong.append(f"{name}: there is no such file")
            continue
        inside = _header(path / name)
        listed = {tensor for tensor, file in index.items() if file == name}
        wrong += [f"{name}: {tensor} is not in it" for tensor in sorted(listed - inside.keys())]
        wrong += [f"{name}: {tensor} is in it, but not in the index" for tensor in sorted(inside.keys() - listed)]
        found |= inside
    if wrong:
        raise ConfigError(f"{path / INDEX} does not fit the files:" + indented(wrong))
    return found


def indented(lines: Iterable[str]) -> str:
    """An indented list, cut short."""
    return "\n  " + few(lines, 8, "\n  ")


# -- writing ------------------------------------------------------------------------------------------------------


def write_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    read: Callable[[str], Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write tensors, one at a time, into as few files as their sizes allow.

    Args:
        folder: where to; it exists.
        shapes: name → shape, in the order in which they are written.
        dtype: what to store.
        read: gives a tensor by its name.
        shard_bytes: the most that is put into a file.
    """
    shards = cut({name: size_of(shape, dtype) for name, shape in shapes.items()}, shard_bytes)
    files = [
        folder / (SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        for number in range(1, len(shards) + 1)
    ]
    for file, names in zip(files, shards, strict=True):
        _write_file(file, {name: shapes[name] for name in names}, dtype, read)
    if len(files) > 1:
        total = sum(size_of(shape, dtype) for shape in shapes.values())
        write_index(folder, {n: file.name for file, names in zip(files, shards, strict=True) for n in names}, total)
    return files


def _write_file(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, read: Callable[[str], Tensor]
) -> None:
    """The library's own writer wants all tensors at once."""
    with file.open("wb") as out:
        out.write(header({name: (shape, dtype) for name, shape in shapes.items()}))
        for name in shapes:
            tensor = read(name).to(dtype).contiguous()
            out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def comments_in(preset: Path) -> dict[Key, str]:
    """The comments beside the keys of a preset's sections."""
    import tomlkit

    tables = {name: table for name, table in tomlkit.parse(preset.read_text(encoding="utf-8")).items() if table}
    return {
        (name, key): comment
        for name, table in tables.items()
        for key in table
        if (comment := table[key].trivia.comment.lstrip("# "))
    }

"""A folder of torch.distributed.checkpoint (DCP), read by torch: the index by an unpickler that knows only the classes
of one, and tensors with `weights_only`."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_train.base.errors import ConfigError, describe
from forge_train.base.untrusted import regular_size
from forge_train.store.manifest import DCP_INDEX, SHARDS
from forge_train.store.tree import MODEL

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

_OPTIMIZER = "optimizer."


class _Unpickler(pickle.Unpickler):
    """Gives the classes of an index, and nothing else. torch's unpickler for `weights_only` (2.13) can't read the
    protocol of an index."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11 writes a member of an enumeration
            return _member
        if module in _KNOWN and name in _KNOWN[module]:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which an index does not need and which could run code")


def _member(owner: object, name: str) -> object:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _MEM_FORMAT_ENCODING[name]


_DCP = "torch.distributed.checkpoint"
_KNOWN: Mapping[str, frozenset[str]] = {
    f"{_DCP}.metadata": frozenset(
        {
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "StorageMeta"),
            *("ChunkStorageMetadata", "MetadataIndex", "_MEM_FORMAT_ENCODING"),
        }
    ),
    f"{_DCP}.filesystem": frozenset({"_StorageInfo"}),
    "torch": frozenset({"Size"}),
    "torch.serialization": frozenset({"_get_layout"}),
    **dict.fromkeys(("pathlib", "pathlib._local"), frozenset({"PosixPath", "WindowsPath"})),
}


class Folder:
    """A DCP folder, read by torch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._weights: dict[str, str] | None = None

    def choose_weights(self) -> dict[str, str]:
        """The tensors outside an optimizer: name in the model → name in the folder.

        Raises:
            ConfigError: if there are none.
        """
        names = [name for name in self.tensors if not name.startswith(_OPTIMIZER)]
        if not names:
            raise ConfigError(f"{self.path}: holds no tensors outside an optimizer.")
        start = MODEL if all(name.startswith(MODEL) for name in names) else ""
        self._weights = {name.removeprefix(start): name for name in names}
        return self._weights

    @cached_property
    def index(self) -> Metadata:
        """Raises ConfigError if it is anything but an index of tensors and plain values."""
        from torch.distributed.checkpoint.metadata import Metadata

        file, most = self.path / DCP_INDEX, 1 << 30
        try:
            if (size := regular_size(file)) > most:
                raise ValueError(f"it has {size:,} bytes, and at most {most:,} are read")
            with file.open("rb") as data:
                found = _Unpickler(data).load()
        except Exception as error:  # whatever a damaged pickle comes to
            text = describe(error).partition("\n")[0][:200].rstrip(".")
            raise ConfigError(f"{file}: not an index of torch.distributed.checkpoint: {text}.") from error
        if not isinstance(found, Metadata):
            raise ConfigError(f"{file}: not an index of torch.distributed.checkpoint.")
        return found

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Name → tensor, on the meta device."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        entries = self.index.state_dict_metadata.items()
        found = {name: one for name, one in entries if isinstance(one, TensorStorageMetadata)}
        try:
            return {
                name: torch.empty(one.size, dtype=one.properties.dtype, device="meta") for name, one in found.items()
            }
        except (TypeError, RuntimeError, AttributeError) as error:
            raise ConfigError(f"{self.path / DCP_INDEX}: {describe(error)}.") from error

    @cached_property
    def files(self) -> set[str]:
        return {str(one.relative_path) for one in (self.index.storage_data or {}).values()}

    @cached_property
    def _reader(self) -> FileSystemReader:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        index = self.index
        if odd := next((name for name in sorted(self.files) if Path(name).name != name), None):
            raise ConfigError(f"{self.path / DCP_INDEX}: names {odd[:100]!r}, which is not in this folder.")

        class Reader(FileSystemReader):
            def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
                return index

        return Reader(self.path)

    def read(self, name: str) -> Tensor:
        """A tensor by its name in the checkpoint."""
        from torch.distributed.checkpoint import load
        from torch.distributed.checkpoint.metadata import MetadataIndex

        if self._weights is not None:
            name = self._weights[name.removeprefix(MODEL)]
        reader, described = self._reader, self.tensors[name]
        first = MetadataIndex(name, torch.Size([0] * described.dim()))
        place = (self.index.storage_data or {}).get(first)
        try:
            if place and place.relative_path.endswith(SHARDS):  # a full tensor in an older checkpoint of Forge
                from safetensors import safe_open

                with safe_open(self.path / place.relative_path, framework="pt") as file:
                    full: Tensor = file.get_tensor(name.removeprefix(MODEL))
                    return full
            tensor = torch.empty(described.shape, dtype=described.dtype)
            with alone():
                load({name: tensor}, storage_reader=reader, no_dist=True)
            return tensor
        except OSError:
            raise
        except Exception as error:
            text = describe(error).partition("\n")[0][:200].rstrip(".")
            raise ConfigError(f"{self.path}: {name!r} can't be read by torch with weights_only: {text}.") from error


@contextmanager
def alone() -> Iterator[None]:
    """Without torch's warning that one process is alone; and the error itself instead of torch's
    `CheckpointException`, which is no `Exception`."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            failed = [failure for failure, _ in error.failures.values()]
            raise next((one for one in failed if isinstance(one, OSError)), failed[0]) from error

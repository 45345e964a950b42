"""A vision model of `transformers` in the place of the one that options describe."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from forge_train import ConfigError, Init
from forge_train.base.errors import describe
from forge_train_kit.hf.library import transformers

from .places import Places
from .transformer import Pixels

if TYPE_CHECKING:
    from .section import VisionSection


class BorrowedVision(nn.Module):
    """Frames of side × side patches to the last hidden states of a class that takes `pixel_values`.

    Tokens before and after the patches, such as a class token and registers, are left out. So are parameters that
    these hidden states do not depend on, such as those of a pooler.

    Raises:
        ConfigError: the class gives something else, its blocks don't get the patches row by row, or the folder's
            tensors are not its own.
    """

    def __init__(self, config: VisionSection) -> None:
        super().__init__()
        self.pixels = Pixels(config)
        self.folder, self.patch, self.side = config.model, config.patch, config.size // config.patch
        self.dim = config.dim
        self.model = _built(config.model)
        features = self._tried(config)
        self._first = _first_patch(config.model, self.patch, self.side)
        _drop_unread(self.model, features)
        self._weights = _Weights(config.model, {name for name, _ in self.model.named_parameters()})

    def forward(self, values: Tensor, where: Places) -> Tensor:
        """Encode `[frames, patches, features]` to `[frames, patches, dim]`, in any order of patches."""
        pixels = self.pixels(values, next(self.model.parameters()).dtype)
        at = (where.row * self.side + where.column).expand(len(values), -1)
        rows = pixels.gather(1, at.argsort(-1)[..., None].expand(-1, -1, pixels.shape[-1]))
        cells = rows.unflatten(1, (self.side, self.side)).unflatten(-1, (self.patch, self.patch, 3))
        images = cells.permute(0, 5, 1, 3, 2, 4).flatten(2, 3).flatten(3)
        features: Tensor = self.model(pixel_values=images).last_hidden_state.narrow(1, self._first, self.side**2)
        return features.gather(1, at[..., None].expand(-1, -1, features.shape[-1]))

    @property
    def units(self) -> tuple[str, ...]:
        """Modules to shard and recompute one by one."""
        return tuple(f"model.{path}" for path in _blocks(self.model))

    def initial(self, name: str) -> Init:
        return Init("given", values=partial(self._weights.read, name.removeprefix("model.")))

    def reset_buffers(self) -> None:
        """Fill the buffers as the class does."""
        with torch.device("cpu"), no_init_weights():
            fresh = dict(_built(self.folder).named_buffers())
        for name, one in self.model.named_buffers():
            one.copy_(fresh[name])

    @property
    def description(self) -> str:
        """The configuration of the class, in JSON."""
        return str(self.model.config.to_json_string())

    def flops(self, patches: int, frame: int) -> int:
        """Operations of a forward pass over so many patches, in frames of so many."""
        weights = sum(int(one.numel()) for one in self.model.parameters() if one.ndim > 1)
        attention = 4 * patches * frame * self.dim * len(self.units)
        return 2 * patches * weights + attention

    def _tried(self, config: VisionSection) -> Tensor:
        first = next(self.model.parameters())
        pixels = torch.zeros(1, 3, config.size, config.size, dtype=first.dtype, device=first.device)
        try:
            with torch.enable_grad():
                found: Any = self.model(pixel_values=pixels).last_hidden_state
            if found.ndim != 3 or found.shape[1] < self.side**2 or found.shape[2] != config.dim:
                raise ValueError(
                    f"it gives {list(found.shape)} for {self.side**2} patches of {config.patch} × {config.patch} pixels"
                )
        except Exception as error:  # whatever a class makes of an image
            raise ConfigError(f"{config.model}: {type(self.model).__name__} doesn't fit: {describe(error)}.") from error
        features: Tensor = found
        return features


class _Weights:
    """The weights of a folder, as the library loads them. They are held until each was read once."""

    def __init__(self, folder: str, names: set[str]) -> None:
        self._folder, self._names = folder, names
        self._held: dict[str, Tensor] = {}

    def read(self, name: str, seed: int) -> Tensor:
        """A parameter.

        Raises:
            ConfigError: the folder has no weights, or others.
        """
        if name not in self._held:
            self._held = self._loaded()
        return self._held.pop(name)

    def _loaded(self) -> dict[str, Tensor]:
        screen = transformers.utils.logging
        level, bars = screen.get_verbosity(), screen.is_progress_bar_enabled()
        screen.set_verbosity_error()
        screen.disable_progress_bar()
        try:
            with torch.device("cpu"):
                model, told = transformers.AutoModel.from_pretrained(
                    self._folder,
                    config=_config(self._folder),
                    ignore_mismatched_sizes=True,  # they are named below
                    output_loading_info=True,
                    local_files_only=True,
                )
        except Exception as error:  # whatever the library makes of files
            raise ConfigError(f"{self._folder}: its weights can't be loaded: {describe(error)}") from error
        finally:
            screen.set_verbosity(level)
            if bars:
                screen.enable_progress_bar()
        lacking = sorted(self._names & {*told["missing_keys"], *(one[0] for one in told["mismatched_keys"])})
        if lacking:
            raise ConfigError(
                f"{self._folder}: its files have no {lacking[0]} of the shape that config.json describes."
            )
        return {name: one.detach() for name, one in model.named_parameters() if name in self._names}


def _config(folder: str) -> Any:
    """The configuration of a folder, or of the vision model inside."""
    try:
        whole = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever the library makes of a file
        raise ConfigError(f"{folder}: its config.json can't be used: {describe(error)}") from error
    return getattr(whole, "vision_config", whole)


def _built(folder: str) -> Any:
    config = _config(folder)
    if dropped := [key for key, one in config.to_dict().items() if "drop" in key and one]:
        raise ConfigError(
            f"{folder}/config.json: {dropped[0]} is a dropout, which is not drawn for items; set it to 0."
        )
    return _of(config)


def _of(config: Any) -> Any:
    return transformers.AutoModel.from_config(config, attn_implementation="sdpa", dtype=torch.get_default_dtype())


def _blocks(model: nn.Module) -> list[str]:
    lists = [(path, one) for path, one in model.named_modules() if isinstance(one, nn.ModuleList)]
    if not lists:
        return []
    path, blocks = max(lists, key=lambda pair: sum(one.numel() for one in pair[1].parameters()))
    return [f"{path}.{index}" for index in range(len(blocks))]


def _first_patch(folder: str, patch: int, side: int) -> int:
    """The place of the first patch among the tokens of a class, found by changing one patch at a time."""
    config = _config(folder)
    config.num_hidden_layers = 1
    got: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        got.append(given[0] if given else named["hidden_states"])

    count = side**2
    tried = sorted({0, 1, side, count - 1} & {*range(count)})
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=()):
        images = torch.zeros(len(tried) + 1, 3, side * patch, side * patch)
        for image, cell in zip(images, tried, strict=False):
            row, column = divmod(cell, side)
            image[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch] = 1
        model = _of(config).float()
        first = (*_blocks(model), "")[0]
        model.get_submodule(first).register_forward_pre_hook(keep, with_kwargs=True)
        model(pixel_values=images)
    tokens = got[0]
    changed = ((tokens - tokens[-1]).abs() > 1e-6).any(-1)[:-1]
    start = int(changed[0].int().argmax())
    if [row.nonzero().flatten().tolist() for row in changed] != [[start + cell] for cell in tried]:
        raise ConfigError(
            f"{folder}: {type(model).__name__} doesn't fit: its blocks don't get {count} patches, row by row."
        )
    return start


def _drop_unread(model: nn.Module, features: Tensor) -> None:
    """Remove what features do not depend on."""
    named = dict(model.named_parameters())
    with torch.enable_grad():
        grads: Any = torch.autograd.grad(features.sum(), [*named.values()], allow_unused=True)
    unread = {name for (name, _), grad in zip(named.items(), grads, strict=True) if grad is None}
    _drop(model, "", unread)


def _drop(module: nn.Module, path: str, unread: set[str]) -> None:
    for name, _ in [*module.named_parameters(recurse=False)]:
        if path + name in unread:
            setattr(module, name, None)
    for name, child in [*module.named_children()]:
        own = {f"{path}{name}.{one}" for one, _ in child.named_parameters()}
        if own and own <= unread:
            setattr(module, name, nn.Identity())
        else:
            _drop(child, f"{path}{name}.", unread)

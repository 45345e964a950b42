"""Features of a frozen vision model, computed once for each item and kept on disk."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge_train import ConfigError
from forge_train_kit.data.cache import cache_folder
from forge_train_kit.data.kept_tensors import KeptTensors

from .encoder import VisionEncoder, vision_model

if TYPE_CHECKING:
    from forge_train import Job, Model

    from .borrowed import BorrowedVision
    from .section import VisionSection
    from .transformer import VisionTransformer

log = logging.getLogger("forge_train")
VERSION = 1
"""Of how features are computed."""
NEUTRAL = ("once", "cache", "cache_bytes", "max_pixels", "max_bytes", "max_seconds", "connector", "queries", "std")
"""Options that features do not depend on."""


def attach(config: VisionSection, name: str, job: Job, model: Model) -> list[Once]:
    """Have the encoders of a modality read what a frozen vision model gives from disk.

    Raises:
        ConfigError: if the vision model is trained from the first step, or another plugin changes how it computes.
    """
    found = []
    own = {id(parameter) for parameter in model.parameters()}  # without what another part of a pipeline has
    for path, module in model.named_modules():
        if isinstance(module, VisionEncoder) and path.rpartition(".")[2] == name:
            _refuse_trained(module.vision, f"{path}.vision", name, own)
            module.once = Once(config, name, job, module)
            found.append(module.once)
    return found


class Once:
    """Encodes each item alone, so that its features depend on nothing but its content and the weights.

    A product of matrices rounds differently with the number of its rows, so features of a whole batch would depend on
    what is in the batch, and a run that is resumed, or finds a cache, would not repeat another to the bit.

    It computes with a copy of the weights: ranks that share the weights have to gather them together, and find
    different items in the cache.

    Args:
        config: the section.
        name: of the modality.
        job: of the run.
        encoder: whose vision model is meant.
    """

    def __init__(self, config: VisionSection, name: str, job: Job, encoder: VisionEncoder) -> None:
        self._config, self._name, self._job, self._encoder = config, name, job, encoder
        self._dtype = _dtype(encoder.vision, job, name)
        _refuse_changed(encoder.vision, self._plain, name)
        self._vision: VisionTransformer | BorrowedVision | None = None
        self._kept: KeptTensors | None = None
        self._told = False

    def __deepcopy__(self, _: object) -> None:
        """A copied model encodes for itself."""
        return

    def leave(self) -> None:
        """Forget the weights: they change, or others were loaded."""
        self._vision = self._kept = None

    def applies(self) -> bool:
        """Return True if nothing of the vision model is trained now; once it is, the cache is left."""
        frozen = not any(one.requires_grad for one in self._encoder.vision.parameters())
        if not frozen:
            self.leave()
        return frozen

    @torch.no_grad()
    def features(self, values: Tensor, grids: Tensor) -> Tensor:
        """The features of padded rows, as `VisionEncoder` computes them; zeros where there is no item."""
        vision, kept = self._frozen()
        encoder, sizes = self._encoder, grids.prod(-1).tolist()
        shape = (len(values), values.shape[1] // encoder.temporal, self._config.dim)
        found = torch.zeros(shape, dtype=next(vision.parameters()).dtype)
        host, grids_there = values.cpu(), grids.cpu()
        for row, of_row in enumerate(sizes):
            at = 0
            for item, size in enumerate(of_row):
                if size:
                    key = _key(host[row, at : at + size], grids_there[row, item])
                    one = kept.get(key)
                    if one is None:
                        alone = values[row : row + 1, at : at + size], grids[row : row + 1, item : item + 1]
                        one = encoder.encoded(*alone, vision)[0].cpu()
                        kept.put(key, one)
                    first = at // encoder.temporal
                    found[row, first : first + len(one)] = one
                at += size
        if kept.full and not self._told:
            self._told = True
            log.warning(
                "%s.cache_bytes: the cache is full, so that further items are encoded each time; raise it.", self._name
            )
        return found.to(values.device)

    @property
    def _plain(self) -> VisionTransformer | BorrowedVision:
        """The vision model as it is built, without memory."""
        with torch.device("meta"):
            return vision_model(self._config)

    def _frozen(self) -> tuple[VisionTransformer | BorrowedVision, KeptTensors]:
        """A copy of the vision model, and what it gave before. The first call gathers sharded weights, on all ranks."""
        if self._vision is None or self._kept is None:
            own = self._encoder.vision
            made = self._plain.to_empty(device=self._job.device).to(self._dtype).requires_grad_(False)
            theirs = dict(own.named_parameters())
            for name, one in made.named_parameters():
                one.copy_(_whole(theirs[name]))
            for name, buffer in own.named_buffers():  # of a dtype of their own
                owner, _, key = name.rpartition(".")
                made.get_submodule(owner)._buffers[key] = buffer.detach().clone()
            self._vision = made
            self._kept = KeptTensors(
                cache_folder(self._config.cache, "encoded"),
                _fingerprint(made, self._config, self._encoder, self._job.device),
                self._config.cache_bytes,
            )
        return self._vision, self._kept


def _refuse_trained(vision: nn.Module, path: str, name: str, own: set[int]) -> None:
    for inner, module in vision.named_modules():
        later = getattr(module, "trained_at_first", {})
        for key, one in module.named_parameters(recurse=False):
            if one.requires_grad and id(one) in own and later.get(key) != 0:
                where = ".".join(part for part in (path, inner, key) if part)
                raise ConfigError(
                    f"{name}.once: {where} is trained, so what the vision model gives changes in every step; freeze "
                    f'it (freeze.parameters = ["{path}.*"]), leave it out of lora.modules, or set {name}.once = false.',
                    key=f"{name}.once",
                )


def _refuse_changed(own: nn.Module, made: nn.Module, name: str) -> None:
    """Refuse modules whose weights another plugin has given another product."""
    plain = dict(made.named_modules())
    for inner, module in own.named_modules():
        if any(True for _ in module.parameters(recurse=False)) and (
            inner not in plain or type(module).forward is not type(plain[inner]).forward
        ):
            raise ConfigError(
                f"{name}.once: another plugin has changed how {inner} of the vision model computes "
                f"({type(module).__name__}); have it leave the vision model out, or set {name}.once = false.",
                key=f"{name}.once",
            )


def _dtype(vision: nn.Module, job: Job, name: str) -> torch.dtype:
    """The dtype that it computes in."""
    found = {
        getattr(module, "compute_dtype", job.precision.param)
        for module in vision.modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    if len(found) > 1:
        kinds = " and ".join(sorted(str(one).removeprefix("torch.") for one in found))
        raise ConfigError(
            f"{name}.once: parts of the vision model compute in {kinds}; give it one dtype, or set {name}.once = "
            "false.",
            key=f"{name}.once",
        )
    only: torch.dtype = found.pop()
    return only


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _key(values: Tensor, grid: Tensor) -> str:
    made = hashlib.blake2b(repr((grid.tolist(), str(values.dtype))).encode(), digest_size=16)
    made.update(values.contiguous().numpy().data)
    return made.hexdigest()


def _fingerprint(
    vision: VisionTransformer | BorrowedVision, config: VisionSection, encoder: VisionEncoder, device: torch.device
) -> str:
    """A hash of all that features depend on beside an item: weights, options, and what computes."""
    options: dict[str, Any] = {name: one for name, one in asdict(config).items() if name not in NEUTRAL}
    cuda = device.type == "cuda"
    machine = torch.cuda.get_device_name(device) if cuda else f"{device.type} of {torch.get_num_threads()}"
    facts = (VERSION, torch.__version__, machine, torch.get_float32_matmul_precision(), encoder.temporal, options)
    made = hashlib.blake2b(repr((*facts, getattr(vision, "description", ""))).encode(), digest_size=16)
    for name, one in sorted(vision.named_parameters()):
        made.update(f"{name} {one.dtype} {list(one.shape)} ".encode())
        made.update(one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()

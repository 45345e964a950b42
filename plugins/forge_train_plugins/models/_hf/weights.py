"""Initial parameters and buffers of a class of `transformers`: as the class makes them, on every layout."""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from forge_train import ConfigError
from forge_train_kit.format import format_lines
from forge_train_kit.hf.folder import CONFIG, DTYPES, Folder
from forge_train_kit.state_map import Plan, Rename, StateMap, Together

from .config import model_class
from .stored import held_by_files


class Drawn:
    """Initial weights by the class's own `_init_weights`, which knows modules and not shards: a unit is made whole on
    the CPU, initialised with a generator that its name seeds, and dropped once the next one is asked for."""

    def __init__(self, config: PreTrainedConfig, units: tuple[str, ...]) -> None:
        self._config, self._units = config, units
        self._model: Any = None
        self._held: tuple[str, int] | None = None

    def parameter(self, name: str, seed: int) -> Tensor:
        """A whole parameter by its name in transformers.

        Raises:
            ConfigError: if the class does not initialise it.
        """
        path = next((unit for unit in self._units if name.startswith(f"{unit}.")), name.rpartition(".")[0])
        if self._held != (path, seed):
            self.drop()
            self._make(path, seed, float("nan"))
            self._held = path, seed
        found: Tensor = self._model.get_parameter(name).detach()
        if found.isnan().any():
            raise ConfigError(
                f"hf: {type(self._model).__name__} does not initialise {name!r}; start from weights (hf.weights)."
            )
        return found

    def buffers(self, path: str) -> dict[str, Tensor]:
        """The buffers of one module, not of those inside.

        Raises:
            ConfigError: if the class does not fill them.
        """
        self.drop()
        found = []
        for start in (0.0, 1.0):
            self._make(path, 0, start)
            found.append({n: b.clone() for n, b in self._model.get_submodule(path).named_buffers(recurse=False)})
        self._held = path, 0
        for name, one in found[0].items():
            if not one.equal(found[1][name]):
                raise ConfigError(
                    f"hf: {type(self._model).__name__} fills the buffer {f'{path}.{name}'!r} only in its constructor, "
                    "and not in _init_weights, so it can't be built on the meta device."
                )
        return found[0]

    def drop(self) -> None:
        """Free what was made last."""
        if self._held is not None:
            self._model.get_submodule(self._held[0]).to("meta")
            self._held = None

    def _make(self, path: str, seed: int, start: float) -> None:
        if self._model is None:
            with torch.device("meta"):
                self._model = model_class(self._config)(self._config)
        module: nn.Module = self._model.get_submodule(path)
        module.to_empty(device="cpu")
        digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.fill_(start)
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            above = [self._model.get_submodule(path[:at]) for at, one in enumerate(path) if one == "."]
            _initialise(module, [one for one in (self._model, *above) if isinstance(one, PreTrainedModel)][-1])


def _initialise(module: nn.Module, owner: Any) -> None:
    """Initialise a module as the innermost model of the library around it does, such as an encoder."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        _initialise(child, owner)
    owner._init_weights(module)


def leftovers(model: Any) -> tuple[str, ...]:
    """Patterns of tensors that files of a class may hold, and that follow from its configuration."""
    return (r"rotary_emb\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or ()))


class Stored:
    """Initial weights from a folder's safetensors files, one tensor at a time."""

    def __init__(self, path: str, model: nn.Module, base: str, *, headless: bool = False) -> None:
        """
        Args:
            path: of the folder.
            model: on the meta device.
            base: the name of the model without its head.
            headless: whether the head starts anew.

        Raises:
            ConfigError: naming the tensors that are missing, of another shape, or of no parameter.
        """
        self._folder = Folder.open(Path(path))
        tied = [
            {n for n, p in model.named_parameters(remove_duplicate=False) if p is one} for one in model.parameters()
        ]
        self._same = {name: names for names in tied for name in names}
        held = held_by_files(model)
        known = {*self._same, *(name for one in held for name in one.files)}
        # Files of the model without its head leave the prefix out.
        spellings = {spelling: name for name in known for spelling in (name.removeprefix(f"{base}."), name)}
        self._spelled = {spellings[name]: name for name in self._folder.tensors if name in spellings}
        wanted = {n: p for n, p in model.named_parameters() if not headless or n.startswith(f"{base}.")}
        plain, converted, wrong = dict[str, str](), dict[StateMap, None](), list[str]()
        for one in (one for one in held if wanted.keys() >= {*one.here}):
            missing = [name for name in one.files if name not in self._spelled]
            if one.operations and not missing:
                converted[one.state_map({name: name for name in one.here})] = None
                continue
            for name in one.here:
                tried = [*(() if one.operations else one.files), *sorted(self._same[name])]
                found = next((other for other in tried if other in self._spelled), None)
                if found:
                    plain[found] = name
                else:
                    wrong.append(f"{(missing or [name])[0]}: missing")
        described = self._folder.described()
        stored = {name: described[other] for name, other in self._spelled.items() if other in described}
        step = Together((Rename(plain), *converted)).trace(stored)
        self._plan = Plan(step.given)
        for name, parameter in wanted.items():
            view = step.given.get(name)
            if view is not None and view.shape != tuple(parameter.shape):
                wrong.append(f"{name}: {[*view.shape]} in the file, {[*parameter.shape]} here")
        wrong = wrong or step.wrong
        odd = [one for one in self._spelled.values() if self._folder.tensors[one].dtype not in DTYPES]
        wrong = [self._folder.odd(one) for one in sorted(odd)] or wrong
        for names in tied:
            copies = sorted(self._spelled[name] for name in names if name in self._spelled)
            for first, second in itertools.pairwise(copies):
                if not torch.equal(self._folder.read(first), self._folder.read(second)):
                    wrong.append(f"{first}: not a copy of {second}, although {CONFIG} ties them")
        buffers = {one for n, _ in model.named_buffers() for one in (n, n.removeprefix(f"{base}."))}
        for name in sorted(self._folder.tensors.keys() - spellings.keys() - buffers):
            if not any(re.search(pattern, name) for pattern in leftovers(model)):
                wrong.append(f"{name}: no parameter takes it")
        if wrong:
            raise ConfigError(
                f"hf.weights: the tensors in {path} are not those of {type(model).__name__}:"
                + format_lines(wrong)
                + self._folder.quantised()
            )

    def parameter(self, name: str, seed: int) -> Tensor:
        """A whole parameter, in the file's dtype."""
        # A part of a pipeline may have another name of a shared one.
        target = next(one for one in (name, *self._same[name]) if one in self._plan.targets)
        return self._plan.read(target, lambda stored, box: self._folder.read(self._spelled[stored], box))

"""The tensors of a class of `transformers` as files hold them: under other names, experts one by one, or fused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from forge_train import ConfigError
from forge_train_kit.state_map import Concat, Rename, Split, Stack, StateMap, Together


@dataclass(frozen=True)
class Held:
    """Tensors of a class, and those that files hold in their place.

    Args:
        here: names of the class.
        files: names in files, as `save_pretrained` writes them.
        operations: what the library does to make the first from the second; none where only the name differs.
        count: how many names in files are parts of one sequence, such as experts.
    """

    here: tuple[str, ...]
    files: tuple[str, ...]
    operations: tuple[Any, ...] = ()
    count: int = 1

    def state_map(self, names: Mapping[str, str]) -> StateMap:
        """From files to this project's names.

        Args:
            names: of the class → here.

        Raises:
            LookupError: for operations that the state map has no counterpart of.
        """
        here = tuple(names[one] for one in self.here)
        match tuple(type(one).__name__ for one in self.operations):
            case ():
                return Rename({self.files[0]: here[0]})
            case ("MergeModulelist",) if self.operations[0].dim == 0:
                return Stack(*_templates(self.files, here[0]))
            case ("MergeModulelist", "Concatenate") if self.operations[0].dim == 0:
                sequences = [self.files[at : at + self.count] for at in range(0, len(self.files), self.count)]
                pairs = [_templates(one, here[0]) for one in sequences]
                stacks = tuple(Stack(each, f"{whole}/{at}") for at, (each, whole) in enumerate(pairs))
                joined = Concat(tuple(one.whole for one in stacks), pairs[0][1], self.operations[1].dim)
                return Together(stacks) >> joined
            case ("Concatenate",):
                return Concat(self.files, here[0], self.operations[0].dim)
            case ("Chunk",):
                return Split(self.files[0], here, self.operations[0].dim)
            case ("Interleave",):
                dim, halves = self.operations[0].dim, (f"{here[0]}/0", f"{here[0]}/1")
                from_, to = (1, 0) if self.operations[0].inverse else (0, 1)
                return Split(self.files[0], halves, dim, groups=from_) >> Concat(halves, here[0], dim, groups=to)
            case kinds:
                raise LookupError(kinds)


def held_by_files(model: Any) -> list[Held]:
    """Return the parameters and persistent buffers in files of a class.

    A tensor that the library stores in a form unknown here keeps the class's name, which `from_pretrained` reads too.

    Args:
        model: on the meta device.
    """
    saved = model.state_dict()
    tensors: dict[str, Tensor] = {name: saved[name] for name, _ in model.named_parameters()}
    tensors |= {name: saved[name] for name, _ in model.named_buffers() if name in saved}
    declared = get_model_conversion_mapping(model, add_legacy=False)
    converters = [one for one in declared if hasattr(one, "operations")]
    # In reverse, as the library saves: a module's own rules come before those of the model around it.
    backwards = [(one, one.reverse_transform()) for one in reversed(converters)]
    groups: dict[tuple[int, str], list[tuple[int, str]]] = {}
    found: list[Held] = []
    for name, tensor in tensors.items():
        for at, (_, reverse) in enumerate(backwards):
            to, pattern = reverse.rename_source_key(name)
            if pattern is not None:
                groups.setdefault((at, to), []).append((reverse.source_patterns.index(pattern), name))
                break
        else:
            found.append(Held((name,), (*revert_weight_conversion(model, {name: tensor}),)))
    for (at, _), members in groups.items():
        names = tuple(name for _, name in sorted(members))
        found += _converted(model, {name: tensors[name] for name in names}, backwards[at][0])
    return found


def _converted(model: Any, tensors: Mapping[str, Tensor], converter: Any) -> Iterator[Held]:
    """Return the stored form of tensors that belong together; each under its own name if that is unknown."""
    try:
        parts = revert_weight_conversion(model, dict(tensors))
        held = Held(
            tuple(tensors), tuple(parts), tuple(converter.operations), len(parts) // len(converter.source_patterns)
        )
        step = held.state_map({name: name for name in tensors}).trace(
            {name: (tuple(one.shape), one.dtype) for name, one in parts.items()}
        )
    except Exception:  # whatever a conversion does with tensors that have no values; see above
        step = None
    made = {name: view.shape for name, view in step.given.items()} if step and not (step.wrong or step.left) else {}
    if made == {name: tuple(one.shape) for name, one in tensors.items()}:
        yield held
    else:
        yield from (Held((name,), (name,)) for name in tensors)


def from_files(held: Iterable[Held], names: Mapping[str, str]) -> tuple[StateMap, tuple[StateMap, ...]]:
    """The map from files to this project's names, and those from further layouts that files may have.

    Args:
        held: what files hold.
        names: of the class → here; tensors that are not named are left out.
    """
    chosen = [one for one in held if all(name in names for name in one.here)]
    converted = [one for one in chosen if one.operations]
    plain = {one.files[0]: names[one.here[0]] for one in chosen if not one.operations}
    if len(plain) + len(converted) < len(chosen):
        raise ConfigError("hf: the class stores several tensors under one name.")
    if not converted:
        return Rename(plain), ()
    as_they_are = {name: names[name] for one in converted for name in one.here}
    # The maps of all layers are one, as their names differ in numbers only.
    maps = dict.fromkeys(one.state_map(names) for one in converted)
    return Together((Rename(plain), *maps)), (Rename(plain | as_they_are),)


def _templates(each: Sequence[str], whole: str) -> tuple[str, str]:
    """Templates of numbered names and of the name of what they become; other numbers are placeholders where both names
    have the same ones.

    Raises:
        LookupError: for names that do not end in a number that counts from 0.
    """
    parts, target = each[0].split("."), whole.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdecimal()]
    if not numbers or any(_numbered(parts, numbers[-1], str(at)) != name for at, name in enumerate(each)):
        raise LookupError(each[0])
    *others, last = numbers
    places = [at for at, part in enumerate(target) if part.isdecimal()]
    if [parts[at] for at in others] == [target[at] for at in places]:
        for number, (here, there) in enumerate(zip(others, places, strict=True)):
            parts[here] = target[there] = f"{{n{number}}}"
    return _numbered(parts, last, "{e}"), ".".join(target)


def _numbered(parts: Sequence[str], at: int, number: str) -> str:
    return ".".join((*parts[:at], number, *parts[at + 1 :]))

"""Layers of a configuration: presets, a file, `FORGE_SET` and `--set`, each overriding the ones before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError, brief, nearest
from forge_train.base.names import canonical
from forge_train.config import LENGTHS
from forge_train.config.tree import TABLE, TOP_KEYS, Key, Origin, OriginKind, Tree, Value, leaves
from forge_train.mesh.axes import CONFIGURED, Table
from forge_train_kit.axes import installed, section_of

from .presets import base_preset, presets
from .toml import Document, read
from .typed import read_text

_SHAPES: dict[str, tuple[type, str]] = {
    "plugins": (list, "a list of names"),
    "without": (list, "a list of names"),
    "preset": (str, "a preset's name"),
    "defaults": (dict, "a table of slots and plugins"),
}


class UnknownPresetError(ConfigError):
    """There is no preset, and no file, of this name."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class Request:
    """A user's request, before anything is read."""

    config: str = ""
    """A TOML file or a preset's name."""
    plugins: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    set: tuple[str, ...] = ()
    environment: str = ""
    """The value of FORGE_SET."""
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Section → values that something else than TOML brings; laid over the file."""
    sections_from: str = ""
    """Source of these values, for messages."""
    model_from: str = ""
    """A folder in Hugging Face layout, a run or a checkpoint: model, weights and tokenizer; the caller puts what it
    describes into `sections`."""
    foreign: str = ""
    """A folder that anybody may have made, with the configuration in it: no code that came with it is run."""
    left_out: tuple[str, ...] = ()
    """Dotted keys of the file and the presets that don't count."""
    brought: tuple[str, ...] = ()
    """Plugins whose sections are among `sections`; `without` leaves one out with its section."""

    @classmethod
    def loaded(cls, fields: Mapping[str, Any]) -> Request:
        """One that went through JSON."""
        values: Any = {name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()}
        return cls(**values)


def lay(request: Request) -> Tree:
    """Read and lay over each other what a request names.

    Raises:
        ConfigError: for a file that can't be read, a preset that does not exist, an assignment that is none.
    """
    tree = Tree(parallel=section_of)
    if beneath := base_preset():
        bottom = _bottom(beneath, beneath.stat().st_mtime_ns)
        tree = replace(bottom, values={**bottom.values}, tables={**bottom.tables}, mistakes=[*bottom.mistakes])
    document, is_preset = _main_document(request.config)
    if document is not None:
        parent = document.data.get("preset")
        if parent is not None and not is_preset:
            _check_top(document, Origin("file", str(document.path)))
            at = f"{document.path}:{document.line(('preset',))}: "
            lay_file(tree, read(preset(parent, at)), Origin("preset", f"{parent}.toml"))
        kind: OriginKind = "preset" if is_preset else "file"
        lay_file(tree, document, Origin(kind, document.path.name if is_preset else str(document.path)))
    for name in request.left_out:
        tree.values.pop(tuple(name.split(".")), None)
    for key, value in leaves(request.sections):
        if value is not TABLE:
            tree.put(key, Value(value, Origin("file", request.sections_from)))
    for assignment in split_assignments(request.environment):
        _assign(tree, assignment, Origin("FORGE_SET"))
    for assignment in request.set:
        _assign(tree, assignment, Origin("--set", f"--set {brief(assignment)}"))
    tree.source = document.path.stem if document else "base"
    return tree


@lru_cache(maxsize=1)
def _bottom(path: Path, changed: int) -> Tree:
    """The preset beneath every configuration, laid once for all that a process reads."""
    tree, document = Tree(parallel=section_of), read(path)
    aliases: dict[str, str] = document.data.get("aliases", {})
    tree.aliases = {tuple(key.split(".")): tuple(other.split(".")) for key, other in aliases.items()}
    lay_file(tree, document, Origin("preset", path.name))
    tree.drop("aliases")
    tree.base = {key: value.value for key, value in tree.values.items() if key[0] in ("plugins", "defaults")}
    return tree


def lay_file(tree: Tree, document: Document, origin: Origin) -> None:
    """Lay a file over what is there.

    Raises:
        ConfigError: for a section that is written twice, with `-` and with `_`, and for a key at the top that is
            something else.
    """
    _check_top(document, origin)
    spellings: dict[str, str] = {}
    written: dict[Key, Key] = {}
    for key, value in leaves(document.data):
        at = Origin(origin.kind, f"{origin.where}:{document.line(key)}")
        if (other := spellings.setdefault(canonical(key[0]), key[0])) != key[0]:
            raise ConfigError(f"{at}: section [{key[0]}] is section [{other}]; write it once.")
        key = (canonical(key[0]), *key[1:])
        if value is TABLE:
            if not _only_aliases(tree, key, document.data[spellings[key[0]]]):
                tree.tables[key] = at
        elif key in (("plugins",), ("without",)):
            _extend(tree, key, Value(value, at))
        elif len(key) == 1 and key[0] not in TOP_KEYS:
            hint = nearest(key[0], TOP_KEYS) or f" Only {', '.join(TOP_KEYS)} and sections stand at the top."
            tree.mistakes.append(f"{at}: {key[0]}: expected a section [{key[0]}], found {value!r}.{hint}")
        else:
            if (twin := written.setdefault(tree.aliases.get(key, key), key)) != key:
                tree.mistakes.append(
                    f"{at}: {'.'.join(twin)} and {'.'.join(key)} are two names of one value; keep one."
                )
            tree.put(key, Value(value, at))


def _only_aliases(tree: Tree, key: Key, section: Mapping[str, Any]) -> bool:
    """Return True if every key of a section is an alias for a key of another section."""
    return len(key) == 1 and bool(section) and all((*key, name) in tree.aliases for name in section)


def _extend(tree: Tree, key: Key, more: Value) -> None:
    """Lists of plugins add up over the layers."""
    old = tree.values.get(key)
    if old is None or not isinstance(old.value, list) or not isinstance(more.value, list):
        tree.values[key] = more
    else:
        tree.values[key] = Value(list(dict.fromkeys([*old.value, *more.value])), more.origin)


def prefer_epochs(tree: Tree) -> None:
    """Take out the length that a preset gives, where the run's is given in epochs."""
    epochs = tree.values.get(("train", "epochs"))
    if epochs is None or _zero(epochs.value) or epochs.origin.kind == "preset":
        return
    for key in LENGTHS:
        if (other := tree.values.get(("train", key))) is not None and other.origin.kind == "preset":
            del tree.values["train", key]


def _zero(value: object) -> bool:
    """Return True for 0 in any notation; what is no number is left to the section's validation."""
    try:
        return float(str(value)) == 0
    except ValueError:
        return False


def preset(name: str, where: str = "") -> Path:
    """The file of a preset; `where` it is named, for the message that there is none."""
    known = presets()
    if name not in known or name == "base":
        names = sorted(set(known) - {"base"})
        hint = _instead(name) or nearest(name, [*names, *_models()]) or f" Presets: {', '.join(names) or 'none'}."
        raise UnknownPresetError(name, f"{where}There is no preset {name!r} and no file or model of that name.{hint}")
    return known[name]


def _instead(name: str) -> str:
    """Suggest what a name that is not a preset may mean; empty if unknown."""
    if Path(name, "config.toml").is_file():
        repeat = f"To repeat that run, train {Path(name, 'config.toml')}; to continue it, use --resume {name}."
        return f" {repeat} To start from its model, use --from {name}."
    return ""


def _models() -> list[str]:
    """The models in Hugging Face layout in this folder."""
    return [file.parent.name for file in Path().glob("*/config.json")]


def _main_document(config: str) -> tuple[Document | None, bool]:
    if not config:
        return None, False
    path = Path(config)
    if config.endswith(".toml") or path.is_file():
        return read(path), False
    return read(preset(config)), True


def _check_top(document: Document, origin: Origin) -> None:
    for key, (shape, words) in _SHAPES.items():
        value = document.data.get(key)
        at = f"{origin.where}:{document.line((key,))}"
        strange = isinstance(value, list) and not all(isinstance(item, str) for item in value)
        if value is not None and (strange or not isinstance(value, shape)):
            raise ConfigError(f"{at}: {key}: expected {words}, found {value!r}.")
        if value is not None and key == "preset" and origin.kind == "preset":
            raise ConfigError(f"{at}: {key}: a preset can't build on another one.")


def split_assignments(environment: str) -> Iterable[str]:
    """Each `key=value` of `FORGE_SET`."""
    return (part.strip() for part in environment.split(";") if part.strip())


def _assign(tree: Tree, assignment: str, origin: Origin) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in assignment):  # how Python reads bytes that are not UTF-8
        raise ConfigError(f"{origin.kind} {assignment!r}: expected UTF-8 text.")
    key, equals, text = assignment.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"{origin.kind} {assignment!r}: expected key=value, like train.steps=200.")
    if len(path) == 1 or path[0] in ("plugins", "without", "preset"):
        hint = " Use --plugins and --without." if path[0] in ("plugins", "without") else ""
        raise ConfigError(f"{origin.kind} {assignment!r}: expected section.key=value, like train.steps=200.{hint}")
    if text and not text.strip(" "):
        raise ConfigError(f"{origin.kind} {assignment!r}: expected a value; nothing behind = is the empty text.")
    tree.put((canonical(path[0]), *path[1:]), Value(text.strip(" "), origin, read_text))


def one_process(request: Request) -> tuple[str, ...]:
    """Return assignments that set every axis of a request to 1."""
    return tuple(f"parallel.{axis}=1" for axis in sorted({*CONFIGURED, *added_axes(lay(request))}))


def added_axes(tree: Tree) -> set[str]:
    """Return the axes of other packages that a configuration names."""
    return {key[0] for key in tree.below(("parallel",))} & installed()


def tiling_axes() -> set[str]:
    """Return the axes whose sizes multiply to the number of processes: Forge's and those of installed packages, without
    the axes of experts, which divide the same processes again."""
    return {*Table().domain("dense"), *installed()}

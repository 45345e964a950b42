"""Configuration layers: presets, a file, `FORGE_SET` and `--set`, each overriding the ones before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..base.errors import ConfigError, brief, nearest
from ..base.names import base_preset, canonical, presets
from .toml import Document, Key, read

OriginKind = Literal["default", "plugin", "preset", "file", "FORGE_SET", "--set"]
TOP_KEYS: dict[str, tuple[type, str]] = {
    "plugins": (list, "a list of names"),
    "without": (list, "a list of names"),
    "preset": (str, "a preset's name"),
    "defaults": (dict, "a table of slots and plugins"),
}
"""Top-level keys of a file, apart from sections."""
CONDITIONAL = ("distributed", "narrow", "fp16", "initialised", "required")
"""Tables of `[defaults]` that count only in several processes, where `train.precision` is not fp32, where it is fp16,
where `train.init_from` is set, and where an enabled plugin requires the slot: nobody looks for these plugins where
there is nothing for them to do."""


@dataclass(frozen=True)
class Origin:
    """Source of a value."""

    kind: OriginKind
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.kind

    @property
    def folder(self) -> Path:
        """Folder that relative paths in this source start from."""
        return Path(self.where.rpartition(":")[0]).parent if self.kind == "file" else Path()


DEFAULT = Origin("default")


@dataclass(frozen=True)
class Value:
    """One configured value. `text` marks one from `FORGE_SET` or `--set`, to be read as its field's type."""

    value: Any
    origin: Origin
    text: bool = False


@dataclass
class Tree:
    """Configured values by key path; later ones replace earlier ones."""

    values: dict[Key, Value] = field(default_factory=dict)
    tables: dict[Key, Origin] = field(default_factory=dict)
    """Tables that were written, empty ones too."""
    mistakes: list[str] = field(default_factory=list)
    """Values at the top of a file, where only sections stand."""
    aliases: dict[Key, Key] = field(default_factory=dict)
    """Keys that stand for others."""

    def put(self, key: Key, value: Value) -> None:
        key = self.aliases.get(key, key)
        for other in [k for k in self.values if k[: len(key)] == key or key[: len(k)] == k]:
            del self.values[other]
        for table in [k for k in self.tables if len(k) > 1 and k[: len(key)] == key]:
            del self.tables[table]
        self.values[key] = value
        self.tables.setdefault(key[:1], value.origin)

    def lay(self, document: Document, origin: Origin) -> None:
        """Lay a file over what is there.

        Raises:
            ConfigError: for a section that is written twice, with `-` and with `_`, and for a key at the top that is
                something else.
        """
        _check_top(document, origin)
        spellings: dict[str, str] = {}
        written: dict[Key, Key] = {}
        for key, value in _leaves(document.data, ()):
            at = Origin(origin.kind, f"{origin.where}:{document.line(key)}")
            if (other := spellings.setdefault(canonical(key[0]), key[0])) != key[0]:
                raise ConfigError(f"{at}: section [{key[0]}] is section [{other}]; write it once.")
            key = (canonical(key[0]), *key[1:])
            if value is _TABLE:
                if not self._only_aliases(key, document.data[spellings[key[0]]]):
                    self.tables[key] = at
            elif key in (("plugins",), ("without",)):
                self._extend(key, Value(value, at))
            elif len(key) == 1 and key[0] not in TOP_KEYS:
                hint = nearest(key[0], TOP_KEYS) or f" Only {', '.join(TOP_KEYS)} and sections stand at the top."
                self.mistakes.append(f"{at}: {key[0]}: expected a section [{key[0]}], found {value!r}.{hint}")
            else:
                if (twin := written.setdefault(self.aliases.get(key, key), key)) != key:
                    self.mistakes.append(
                        f"{at}: {'.'.join(twin)} and {'.'.join(key)} are two names of one value; keep one."
                    )
                self.put(key, Value(value, at))

    def _only_aliases(self, key: Key, section: Mapping[str, Any]) -> bool:
        """Return True if every key of a section is an alias for a key of another section."""
        return len(key) == 1 and bool(section) and all((*key, name) in self.aliases for name in section)

    def _extend(self, key: Key, more: Value) -> None:
        """Lists of plugins add up over the layers."""
        old = self.values.get(key)
        if old is None or not isinstance(old.value, list) or not isinstance(more.value, list):
            self.values[key] = more
        else:
            self.values[key] = Value(list(dict.fromkeys([*old.value, *more.value])), more.origin)

    def below(self, prefix: Key) -> dict[Key, Value]:
        """Return the values under a table, by the rest of their path; empty tables inside it become empty values."""
        size = len(prefix)
        empty = {
            key: Value({}, origin)
            for key, origin in self.tables.items()
            if len(key) > 1 and not any(other[: len(key)] == key for other in self.values)
        }
        found = {**self.values, **empty}
        return {key[size:]: value for key, value in found.items() if key[:size] == prefix and len(key) > size}

    def drop(self, section: str) -> None:
        self.values = {key: value for key, value in self.values.items() if key[0] != section}
        self.tables = {key: origin for key, origin in self.tables.items() if key[0] != section}

    def sections(self) -> dict[str, Origin]:
        """Names of all sections, with where each was first written by the strongest layer."""
        found: dict[str, Origin] = {}
        for key, origin in self.tables.items():
            found.setdefault(key[0], origin)
        for key, value in self.values.items():
            if len(key) > 1 and _strength(value.origin) > _strength(found.get(key[0], DEFAULT)):
                found[key[0]] = value.origin
        return {name: origin for name, origin in found.items() if name not in TOP_KEYS}


def _strength(origin: Origin) -> int:
    return ("default", "plugin", "preset", "file", "FORGE_SET", "--set").index(origin.kind)


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
    """A folder in Hugging Face layout with model, weights and tokenizer; the caller puts what it describes into
    `sections`."""
    foreign: str = ""
    """A folder that anybody may have made, with the configuration in it: no code that came with it is run."""
    brought: tuple[str, ...] = ()
    """Plugins whose sections are among `sections`; `without` leaves one out with its section."""

    @classmethod
    def loaded(cls, fields: Mapping[str, Any]) -> Request:
        """One that went through JSON."""
        values: Any = {name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()}
        return cls(**values)


@dataclass(frozen=True)
class Layered:
    """All layers, laid over each other."""

    tree: Tree
    source: str
    """The preset's name, or the file's stem."""


def lay(request: Request) -> Layered:
    """Read and lay over each other what a request names.

    Raises:
        ConfigError: for a file that can't be read, a preset that does not exist, an assignment that is none.
    """
    tree = Tree()
    if beneath := base_preset():
        bottom = read(beneath)
        aliases: dict[str, str] = bottom.data.get("aliases", {})
        tree.aliases = {tuple(key.split(".")): tuple(other.split(".")) for key, other in aliases.items()}
        tree.lay(bottom, Origin("preset", beneath.name))
        tree.drop("aliases")
    document, is_preset = _main_document(request.config)
    if document is not None:
        parent = document.data.get("preset")
        if parent is not None and not is_preset:
            _check_top(document, Origin("file", str(document.path)))
            at = f"{document.path}:{document.line(('preset',))}: "
            tree.lay(read(preset(parent, at)), Origin("preset", f"{parent}.toml"))
        kind: OriginKind = "preset" if is_preset else "file"
        tree.lay(document, Origin(kind, document.path.name if is_preset else str(document.path)))
    for key, value in _leaves(request.sections, ()):
        if value is not _TABLE:
            tree.put(key, Value(value, Origin("file", request.sections_from)))
    for assignment in assignments(request.environment):
        _assign(tree, assignment, Origin("FORGE_SET"))
    for assignment in request.set:
        _assign(tree, assignment, Origin("--set", f"--set {brief(assignment)}"))
    return Layered(tree, document.path.stem if document else "base")


def preset(name: str, where: str = "") -> Path:
    """The file of a preset; `where` it is named, for the message that there is none."""
    known = presets()
    if name not in known or name == "base":
        names = sorted(set(known) - {"base"})
        raise UnknownPresetError(
            name,
            f"{where}There is no preset {name!r} and no file of that name.{nearest(name, names) or _instead(name)} "
            f"Presets: {', '.join(names) or 'none'}.",
        )
    return known[name]


def _instead(name: str) -> str:
    """Suggest what a name that is not a preset may mean; empty if unknown."""
    if Path(name, "config.toml").is_file():
        return f" To repeat that run, train {Path(name, 'config.toml')}; to continue it, use --resume {name}."
    return ""


def _main_document(config: str) -> tuple[Document | None, bool]:
    if not config:
        return None, False
    path = Path(config)
    if config.endswith(".toml") or path.is_file():
        return read(path), False
    return read(preset(config)), True


def _check_top(document: Document, origin: Origin) -> None:
    for key, (shape, words) in TOP_KEYS.items():
        value = document.data.get(key)
        at = f"{origin.where}:{document.line((key,))}"
        strange = isinstance(value, list) and not all(isinstance(item, str) for item in value)
        if value is not None and (strange or not isinstance(value, shape)):
            raise ConfigError(f"{at}: {key}: expected {words}, found {value!r}.")
        if value is not None and key == "preset" and origin.kind == "preset":
            raise ConfigError(f"{at}: {key}: a preset can't build on another one.")


_TABLE = object()


def _leaves(table: Mapping[str, Any], prefix: Key) -> Iterator[tuple[Key, Any]]:
    for name, value in table.items():
        key = (*prefix, name)
        if isinstance(value, dict):
            yield key, _TABLE
            yield from _leaves(value, key)
        else:
            yield key, value


def assignments(environment: str) -> Iterable[str]:
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
    tree.put((canonical(path[0]), *path[1:]), Value(text.strip(" "), origin, text=True))

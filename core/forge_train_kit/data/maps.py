"""Changes of documents before they are tokenised: filters, maps, augmentation. Plugins, found by name.

A distribution adds one through an entry point of the group `forge_train.maps`, whose object is a class; the options
that a user writes after its name are keyword arguments of the class:

    [project.entry-points."forge_train.maps"]
    lower = "my_package:Lower"
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import EntryPoint
from random import Random
from typing import Any, Protocol

from forge_train import ConfigError
from forge_train.base.errors import ForgeError, describe, nearest
from forge_train.registry.discovery import identity
from forge_train_kit.tokenizer import Tokenizer

GROUP = "forge_train.maps"


class Map(Protocol):
    """A change of documents.

    An attribute `tokens`, if there is one, names tokens that the tokenizer must have, each as one id.
    """

    def __call__(self, text: str, random: Random) -> Iterable[str]:
        """Return what a document becomes: nothing if it is left out, itself, another one, or several.

        Args:
            text: of the document.
            random: seeded by the document and the map's name alone, so that every preparation draws the same.
        """
        ...


class Maps:
    """Maps one after the other.

    Args:
        specs: `name`, or `name:option=value,option=value`, with values as in TOML; what is no TOML is a string.

    Raises:
        ConfigError: there is no such map, or it takes no such options.
    """

    def __init__(self, specs: Sequence[str]) -> None:
        self._maps = [(spec, _open(spec)) for spec in specs]

    def __call__(self, document: bytes) -> Iterator[bytes]:
        """Yield what a document becomes, in UTF-8."""
        if not self._maps:
            yield document
            return
        texts = [document.decode("utf-8")]
        for spec, one in self._maps:
            texts = [made for text in texts for made in _applied(spec, one, text)]
        yield from (text.encode("utf-8") for text in texts if text)

    def check(self, tokenizer: Tokenizer) -> None:
        """Hold a tokenizer to the tokens that maps write.

        Raises:
            ConfigError: it lacks one.
        """
        for spec, one in self._maps:
            for token in getattr(one, "tokens", ()):
                if len(tokenizer.encode(token)) != 1:
                    raise ConfigError(f"--map {spec}: {token!r} is no token of this tokenizer.")


def _applied(spec: str, one: Map, text: str) -> list[str]:
    seed = hashlib.blake2b(f"{spec.partition(':')[0]}\0{text}".encode(), digest_size=8).digest()
    try:
        return list(one(text, Random(seed)))
    except Exception as error:  # whatever a stranger's map does with a text
        raise ConfigError(f"--map {spec}: failed on the document {text[:40]!r}: {describe(error)}") from error


def _open(spec: str) -> Map:
    name, _, options = spec.partition(":")
    points = _points()
    if len(points.get(name, ())) > 1:
        owners = " and ".join(" ".join(identity(point.dist)) for point in points[name])
        raise ConfigError(f"--map {name}: is a map of {owners}; uninstall one.")
    if name not in points:
        raise ConfigError(f"--map {name}: there is no such map.{nearest(name, points)} Maps: {', '.join(points)}.")
    try:
        made = points[name][0].load()
        arguments = _options(spec, options)
        inspect.signature(made).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"--map {spec}: {error}.") from error
    except Exception as error:  # whatever a stranger's module does while it is imported
        if isinstance(error, ForgeError):
            raise
        raise ConfigError(f"--map {spec}: {points[name][0].value} can't be loaded: {describe(error)}") from error
    try:
        found: Map = made(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--map {spec}: {error}") from error
    return found


def _options(spec: str, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--map {spec}: expected name:option=value,option=value.")
        try:
            found[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = value
    return found


@cache
def _points() -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
        found.setdefault(point.name, []).append(point)
    return found

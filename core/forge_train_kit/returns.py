"""Expected results of hooks and of the objects they return, read from annotations of hookspecs and protocols."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from forge_train.base.errors import PluginError
from forge_train.base.format import place
from forge_train.contract import protocols
from forge_train.plugin.inspection import ReturnCheck
from forge_train.plugin.specs import HookSpec

_WORDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
_TORCH = {"torch": "torch", "nn": "torch.nn", "Tensor": "torch.Tensor"}
"""Names in annotations that are not imported where they stand, since torch is slow to import."""


@cache
def returned(spec: HookSpec[..., Any]) -> ReturnCheck:
    """Return the kind of value that a hook must return.

    Raises:
        PluginError: if the spec's annotation can't be checked.
    """
    try:
        return _result(spec.function)
    except (NameError, TypeError, KeyError) as error:
        raise PluginError(
            f"Hook {spec.name!r}{spec.declared}: what it returns can't be checked: {error}. Annotate it with classes, "
            "and import these outside of `if TYPE_CHECKING`."
        ) from error


def protocol_of(spec: HookSpec[..., Any]) -> type:
    """Return the protocol that the annotation of a spec names.

    Raises:
        PluginError: if it is none.
    """
    cls: Any = _evaluated(spec.function.__annotations__["return"], spec.function.__globals__)
    if not getattr(cls, "_is_protocol", False):
        raise PluginError(
            f"Hook {spec.name!r}{spec.declared}: `checked=True` needs a protocol as annotation, found {cls}."
        )
    return typing.cast("type", cls)


@cache
def results(protocol: type) -> dict[str, ReturnCheck]:
    """Method of a protocol → what it must give."""
    return {name: _result(function) for name, function in _methods(protocol).items()}


def kind_of(annotation: Any) -> ReturnCheck:
    """Return the kind of value that an annotation stands for.

    Raises:
        TypeError: if the annotation can't be checked.
    """
    annotation = _evaluated(annotation, vars(protocols))
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return ReturnCheck("anything", lambda value: "")
    if annotation in (None, types.NoneType):
        return ReturnCheck("None", lambda value: "" if value is None else found(value))
    if origin in _FORMS:
        return _FORMS[origin](*inner)
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return _several(origin, inner)
    if isinstance(annotation, type):
        return _class(annotation)
    raise TypeError(f"an annotation that can't be checked: {annotation!r}")


def found(value: Any) -> str:
    """`found a list`: no value of a tensor is read."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"found {str(value)[:40]!r}" if isinstance(value, str) else f"found {value}"
    if isinstance(value, type):
        return f"found the class {value.__qualname__} itself; return an instance of it"
    if isinstance(value, types.GeneratorType):
        return "found a generator; use `return` in the place of `yield`"
    if inspect.iscoroutine(value):
        return "found a coroutine; hooks are no `async` functions"
    if inspect.isroutine(value):
        return f"found the function {value.__name__}"
    shape = getattr(value, "shape", None)
    return f"found {_article(type(value).__qualname__)}" + (f" of shape {list(shape)}" if shape is not None else "")


def _result(function: Any) -> ReturnCheck:
    return kind_of(_evaluated(function.__annotations__["return"], function.__globals__))


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        module, _, attribute = _TORCH[name].partition(".")
        torch = __import__(module)
        return getattr(torch, attribute) if attribute else torch


def _evaluated(annotation: Any, names: Mapping[str, Any]) -> Any:
    text = getattr(annotation, "__forward_arg__", annotation)
    return eval(text, dict(names), _Names()) if isinstance(text, str) else text


def _name(cls: type) -> str:
    home = cls.__module__.split(".")
    return _WORDS.get(cls) or _article(".".join([*home[:2], cls.__name__]) if home[0] == "torch" else cls.__name__)


def _article(name: str) -> str:
    return f"{'an' if name.startswith((*'AEIOUaeio', 'HF')) else 'a'} {name}"


def _class(cls: type) -> ReturnCheck:
    if getattr(cls, "_is_protocol", False):
        return _protocol(cls)
    if dataclasses.is_dataclass(cls):
        return _record(cls)
    accepted = (int, float) if cls is float else cls
    return ReturnCheck(_name(cls), lambda value: "" if isinstance(value, accepted) else found(value))


def _union(*members: Any) -> ReturnCheck:
    kinds = sorted((kind_of(member) for member in members), key=lambda kind: kind.words == "None")
    words = [kind.words for kind in kinds]
    nothing = "None" in words

    def problem(value: Any) -> str:
        if value is None and nothing:
            return ""
        problems = [kind.problem(value) for kind in kinds]
        if not all(problems):
            return ""
        return next((text for text in problems if text != found(value)), problems[0])

    return ReturnCheck(" or ".join(filter(None, [", ".join(words[:-1]), words[-1]])), problem)


def _marked(annotation: Any, mark: str) -> ReturnCheck:
    """`Annotated[Tensor, "one value"]`, or `Annotated[Head, "nn.Module"]` for an object that must be that too."""
    if mark == "one value":
        return _scalar(annotation)
    base, kind = kind_of(mark), kind_of(annotation)
    return ReturnCheck(base.words, lambda value: base.problem(value) or kind.problem(value))


def _scalar(tensor: Any) -> ReturnCheck:
    def problem(value: Any) -> str:
        return "" if isinstance(value, tensor) and value.dim() == 0 else found(value)

    return ReturnCheck("a 0-dim tensor", problem)


def _function(*signature: Any) -> ReturnCheck:
    def problem(value: Any) -> str:
        if hasattr(value, "__enter__") and not isinstance(value, type):
            return f"{found(value)}, a context manager; return the function that makes it, without calling it"
        return "" if callable(value) else found(value)

    return ReturnCheck("a function", problem)


def _choice(*values: Any) -> ReturnCheck:
    return ReturnCheck(" or ".join(map(repr, values)), lambda value: "" if value in values else found(value))


_FORMS: dict[Any, Callable[..., ReturnCheck]] = {
    typing.Union: _union,
    types.UnionType: _union,
    typing.Annotated: _marked,
    typing.Literal: _choice,
    Callable: _function,
}


def _several(origin: type, inner: tuple[Any, ...]) -> ReturnCheck:
    mixed = origin is tuple and ... not in inner
    of = kind_of(Any if mixed else inner[-1] if issubclass(origin, Mapping) else inner[0])
    word = "dictionary" if issubclass(origin, Mapping) else "tuple" if origin is tuple else "list"
    accepted = {"dictionary": (Mapping,), "tuple": (tuple, list), "list": (Iterable,)}[word]

    def problem(value: Any) -> str:
        if not isinstance(value, accepted) or isinstance(value, (str, bytes)) or hasattr(value, "forward"):
            return found(value)
        items = value.values() if isinstance(value, Mapping) else () if isinstance(value, Iterator) else value
        wrong = next((text for item in items if (text := of.problem(item))), "")
        return f"{found(value)}, and in it {wrong.removeprefix('found ')}" if wrong else ""

    bare = " or ".join(one.partition(" ")[2] or one for one in of.words.split(" or "))
    return ReturnCheck(f"a {word}" if of.words == "anything" else f"a {word} of {bare}", problem)


def _record(cls: type) -> ReturnCheck:
    names = vars(sys.modules[cls.__module__])

    @cache
    def kinds() -> list[tuple[str, ReturnCheck]]:
        fields = dataclasses.fields(typing.cast(Any, cls))
        return [(field.name, kind_of(_evaluated(field.type, names))) for field in fields]

    def problem(value: Any) -> str:
        if not isinstance(value, cls):
            return found(value)
        for name, kind in kinds():
            if text := kind.problem(getattr(value, name)):
                return f"found one whose `{name}` is not {kind.words}: {text}"
        return ""

    return ReturnCheck(_article(cls.__name__), problem)


def _protocol(cls: type) -> ReturnCheck:
    methods = _methods(cls)
    attributes = [name for name in vars(cls).get("__annotations__", ()) if not name.startswith("_")]

    def problem(value: Any) -> str:
        if isinstance(value, type):
            return found(value)
        wanted = [*methods, *attributes]
        if missing := [name for name in wanted if not hasattr(value, name)]:
            return found(value) + ("" if missing == ["__call__"] else f", which lacks {', '.join(missing)}")
        return next((text for name, function in methods.items() if (text := _uncallable(value, name, function))), "")

    return ReturnCheck("a function" if list(methods) == ["__call__"] else _article(cls.__name__), problem)


def _methods(cls: type) -> dict[str, Any]:
    """The methods that a protocol asks for."""
    public = ("__call__", "__iter__", "__next__")
    return {
        name: function
        for name, function in vars(cls).items()
        if inspect.isfunction(function) and (name in public or not name.startswith("_"))
    }


def _uncallable(value: Any, name: str, declared: Any) -> str:
    """Describe what is wrong with a method's parameters, as far as its signature shows them."""
    method = getattr(value, name)
    if name == "__call__":
        method = getattr(value, "forward", value)  # a module's own `__call__` takes anything
    _, *parameters = inspect.signature(declared).parameters.values()
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    named = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # of a built-in function
        return ""
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        shown = ", ".join([*positional, *(f"{one}=…" for one in named)])
        what = "" if name == "__call__" else f", whose {name}"
        return f"{found(value)}{what} ({place(method)}) can't be called with ({shown}): {error}"
    return ""

"""Calls of tools and their schemas, held as JSON, as JSON in a string, or as a table's columns."""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from forge_train import ConfigError
from forge_train.base.errors import describe

from .spelling import check_spelling


def plain(value: Any) -> Any:
    """The same of JSON's types alone: a template, which is a stranger's program, gets no object with methods.

    A key whose value is null counts as absent: the columns of a table have every key in every row, so that null and
    absent can't be told apart there, and a record is to be rendered alike from every format.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real | Decimal) else str(value)


def listed(value: Any, where: str) -> Any:
    """A list that may be JSON in a string, as in CSV; other strings stay.

    Raises:
        ConfigError: it begins as a list, and is no JSON.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    return _parsed(value, where)


def tools_of(tools: Any, where: str) -> tuple[Any, ...]:
    """JSON schemas of tools; tables often hold them, each of them, or their parameters as JSON in a string."""
    where = f"{where}: tools"
    if isinstance(tools, str):
        tools = _parsed(tools, where) if tools.strip() else []
    if isinstance(tools, (list, tuple)):
        tools = [_parsed(tool, where) if isinstance(tool, str) and tool.lstrip()[:1] == "{" else tool for tool in tools]
    tools = plain(tools or [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{where}: expected a list of JSON schemas, found {tools!r}.")
    for tool in tools:
        for holder in (tool, tool.get("function")):
            if isinstance(holder, dict) and isinstance(schema := holder.get("parameters"), str):
                holder["parameters"] = plain(_parsed(schema, f"{where}: parameters"))
    return tuple(tools)


def calls_of(calls: Any, where: str) -> list[dict[str, Any]]:
    """The calls of a message, each with an object of arguments; OpenAI writes these as JSON in a string.

    Raises:
        ConfigError: they are no list of calls, or the arguments are no object.
    """
    calls = listed(calls, where)
    calls = (
        [_parsed(call, where) if isinstance(call, str) else call for call in calls] if type(calls) is list else calls
    )
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ConfigError(f"{where}: expected a list of calls, found {calls!r}.")
    return [_call(plain(call), f"{where}[{at}]") for at, call in enumerate(calls)]


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    check_spelling(call, ("function", "arguments"), where)
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _call(inner, f"{where}.function")}
    if not isinstance(arguments := call.get("arguments"), str):
        return call
    found: Any = arguments if arguments.strip() else {}
    while isinstance(found, str):
        found = _parsed(found, f"{where}.arguments")
    if not isinstance(found, dict):
        raise ConfigError(f"{where}.arguments: expected a JSON object, found {arguments[:40]!r}.")
    return {**call, "arguments": plain(found)}


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: no JSON: {describe(error)}") from error

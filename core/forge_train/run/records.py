"""The lines of a run's `metrics.jsonl` and `events.jsonl`: their schemas, and how they are written."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, PluginError
from ..base.files import disk_errors
from ..base.strict_json import COUNT, NUMBER, check_text, dumps, loads, odd

log = logging.getLogger("forge_train")

METRICS_VERSION = 1
"""Of the lines of metrics.jsonl. It grows when a reader of older lines would misread newer ones."""
METRICS: dict[str, type | tuple[type, ...]] = {
    "version": int,
    "step": int,
    "tokens": int,
    "loss": float,
    "grad_norm": float,
    "lr": float,
    "tokens_per_second": float,
    "step_seconds": float,
    "memory_gib": float,
    "data_wait": float,
}
"""The keys of every line of metrics.jsonl. Plugins add keys under their own name; `timing`, where it stands, lists
those of them that differ from run to run."""

TIMINGS = frozenset({"tokens_per_second", "step_seconds", "memory_gib", "data_wait"})
"""The keys of METRICS that differ from run to run."""
_METRICS_LINE = {"step": COUNT, "loss": float, "timing?": [str], **{f"{key}?": NUMBER for key in METRICS}}


@dataclass(frozen=True)
class EventSchema:
    """One kind of line in events.jsonl: beside `event`, `version`, `time` and `step` it has these fields."""

    name: str
    fields: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    version: int = 1


_NUMBER = (int, float)

EVENTS = {
    schema.name: schema
    for schema in (
        EventSchema("run_started", {"run": str, "plugins": list, "world": int}),
        EventSchema("initialised", {"checkpoint": str, "missing": list, "unexpected": list}),
        EventSchema("resumed", {"checkpoint": str, "changes": list}),
        EventSchema("checkpoint_saved", {"path": str, "seconds": _NUMBER, "blocked": _NUMBER, "bytes": int}, version=2),
        EventSchema("checkpoint_copied", {"path": str, "seconds": _NUMBER, "bytes": int}),
        EventSchema("checkpoint_pruned", {"path": str}),
        EventSchema("evaluation", {"loss": _NUMBER, "tokens": int, "metrics": dict}),
        EventSchema("anomaly", {"kind": str, "reason": str}),
        EventSchema("interrupted", {"reason": str}),
        EventSchema("restarted", {"reason": str, "attempt": int, "world": int}),
        EventSchema(
            "run_finished",
            {"outcome": str, "loss": (int, float, type(None)), "reason": str, "error": (dict, type(None))},
            version=2,
        ),
    )
}
"""Core's events. A plugin registers its own through `job.run.register`."""


class Records:
    """Appends to a run's two files; each line is flushed as it is written."""

    def __init__(self, folder: Path) -> None:
        self.metrics_file = folder / "metrics.jsonl"
        self.events_file = folder / "events.jsonl"
        self._schemas = dict(EVENTS)

    def register(self, schema: EventSchema) -> None:
        """Make a plugin's kind of event known.

        Raises:
            PluginError: if the name stands for something else.
        """
        if self._schemas.setdefault(schema.name, schema) != schema:
            raise PluginError(f"The event {schema.name!r} is registered already, with other fields.")

    def event(self, name: str, step: int, **fields: Any) -> None:
        """Write one event.

        Raises:
            PluginError: if it is not registered, or its fields are not those of its schema.
        """
        schema = self._schemas.get(name)
        if schema is None:
            raise PluginError(
                f"The event {name!r} is not registered: job.run.register(EventSchema({name!r}, …)) first."
            )
        if fields.keys() != schema.fields.keys():
            raise PluginError(f"Event {name!r} has the fields {sorted(schema.fields)}, found {sorted(fields)}.")
        for key, value in fields.items():
            if not isinstance(value, schema.fields[key]):
                raise PluginError(f"Event {name!r}, {key!r}: {value!r} is not of the registered type.")
        line = {"event": name, "version": schema.version, "time": time.time(), "step": step, **fields}
        _append(self.events_file, line)

    def metrics(self, line: Mapping[str, Any]) -> None:
        _append(self.metrics_file, {"version": METRICS_VERSION, **line})

    def retract(self, name: str, since: float) -> None:
        """Drop the last event of this name if it was written since then; plugins may have written others after it."""
        lines = list(read(self.events_file, strict=False))
        at = max((at for at, line in enumerate(lines) if line["event"] == name), default=-1)
        if at >= 0 and lines[at]["time"] >= since:
            _rewrite(self.events_file, [*lines[:at], *lines[at + 1 :]])

    def cut(self, step: int) -> None:
        """Drop the metrics of steps after `step`, which are about to be repeated; the file changes all at once."""
        if not self.metrics_file.exists():
            return
        lines = read(self.metrics_file, strict=False)
        _rewrite(self.metrics_file, [line for line in lines if line["step"] <= step])


def read(file: Path, *, strict: bool = True) -> Iterator[dict[str, Any]]:
    """The lines of a file of records; a last line that was cut off while it was written is left out.

    Args:
        file: which need not be there.
        strict: whether a damaged line is an error. A run that goes on leaves it out, with a warning.

    Raises:
        ValueError: for a damaged line.
        ConfigError: for lines of a newer version than is known here.
    """
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n") or not line.strip():
                continue
            try:
                found = loads(line.decode("utf-8"))
                if b"\\u" in line:
                    check_text(found)
                _check(file, found)
            except ValueError as error:
                if strict:
                    raise ValueError(f"line {number}: {error}") from error
                log.warning("%s:%d is damaged, and is left out.", file, number)
                continue
            yield found


def _check(file: Path, line: Any) -> None:
    """Check the shape of a line; a plugin's events are for the plugin to read.

    Raises:
        ValueError: saying what is wrong.
        ConfigError: if it is of a newer version than is known here.
    """
    events = file.name == "events.jsonl"
    problem = odd(line, {"version?": int, "step?": COUNT, **({"event": str} if events else {"event?": str})})
    if not problem:
        _check_version(file, line)
        if file.name == "metrics.jsonl":
            problem = odd(line, _METRICS_LINE)
        elif schema := EVENTS.get(line.get("event", "")):
            fields = schema.fields if line.get("version", 1) == schema.version else {}
            problem = odd(line, {"step": COUNT, "time": float, **fields})
            if not problem and schema.name == "evaluation":
                problem = odd(line["metrics"], {"*": NUMBER})
    if problem:
        raise ValueError(problem)


def _check_version(file: Path, line: Mapping[str, Any]) -> None:
    known = EVENTS[line["event"]].version if line.get("event") in EVENTS else METRICS_VERSION
    if line.get("version", 1) > known and ("event" not in line or line["event"] in EVENTS):
        raise ConfigError(
            f"{file}: was written by a newer forge: {line.get('event', 'metrics')} of version {line['version']}, and "
            f"version {known} is the newest known here. Upgrade forge-train."
        )


def _rewrite(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Give a file other lines, all at once."""
    part = file.with_suffix(".jsonl.partial")
    try:
        with disk_errors(file):
            part.write_text("".join(f"{dumps(line)}\n" for line in lines), encoding="utf-8")
            part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _append(file: Path, line: Mapping[str, Any]) -> None:
    text = dumps(line) + "\n"
    with disk_errors(file), file.open("a+b") as out:
        if out.tell() and not _ends_whole(file):
            out.truncate(file.read_bytes().rfind(b"\n") + 1)  # a crash cut the last line off
        out.write(text.encode())


def _ends_whole(file: Path) -> bool:
    with file.open("rb") as data:
        data.seek(-1, 2)
        return data.read(1) == b"\n"

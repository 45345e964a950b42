"""Tasks from local files: a TOML table for each, or a JSONL file as it is."""

from __future__ import annotations

import dataclasses
import posixpath
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from forge_train.base.errors import ConfigError, nearest
from forge_train.config.schema import FilePath, Ge, Gt, Le, section
from forge_train.config.tree import TABLE, Origin, Value, leaves
from forge_train.config.validate import validate
from forge_train_kit.data.files import find
from forge_train_kit.data.formats import lookup, utf8
from forge_train_kit.data.items import in_folder

from ..configuration.toml import read
from ..inference.records import whole
from . import checks

Record = tuple[str, Mapping[str, Any]]
"""A place, and the fields of the record that stands there."""


@section
class Perplexity:
    """The probability of texts.

    Args:
        kind: `perplexity`.
        data: a file, a folder or a pattern of texts.
        field: of a record that holds its text.
    """

    kind: Literal["perplexity"]
    data: Annotated[str, FilePath()]
    field: str = "text"


@section
class Choice:
    """The likeliest of several continuations.

    Args:
        kind: `choice`.
        data: a file, a folder or a pattern of records.
        prompt: a text with `{field}` for what a record holds.
        choices: a field that holds a list of texts, or a list of texts with `{field}`.
        answer: a field that holds the right choice: its number from 0, its text, or a list of such.
        delimiter: what is between the prompt and a choice.
        prefix: text before everything else.
        shots: number of examples before each prompt.
        shots_data: file of the examples, which are taken from its beginning.
        separator: what follows each example.
        items: modality → the field of a record that holds its items for the prompt, one or a list.
    """

    kind: Literal["choice"]
    data: Annotated[str, FilePath()]
    prompt: str = "{prompt}"
    choices: str | tuple[str, ...] = "choices"
    answer: str = "answer"
    delimiter: str = " "
    prefix: str = ""
    shots: Annotated[int, Ge(0)] = 0
    shots_data: Annotated[str, FilePath()] = ""
    separator: str = "\n\n"
    items: Mapping[str, str] = dataclasses.field(default_factory=dict)


@section
class Generate:
    """Answers that the model writes, and their check.

    Args:
        kind: `generate`.
        data: as for `choice`; so are `prompt`, `delimiter`, `prefix`, `shots`, `shots_data`, `separator` and `items`.
        answer: a field that holds the right answer, or a list of right ones.
        check: `exact`, `normalised`, `regex`, or a function `package.module:function` or `file.py:function`.
        extract: a pattern whose first group, or all of it, is the answer in what was written.
        tokens: the most tokens of an answer.
        stop: texts that end an answer.
        samples: number of answers to each prompt.
        k: for `pass@k`: numbers of answers of which one must be right.
        temperature: as in `forge generate`; so are `top_k`, `top_p` and `seed`.
    """

    kind: Literal["generate"]
    data: Annotated[str, FilePath()]
    prompt: str = "{prompt}"
    answer: str = "answer"
    check: Annotated[str, FilePath(dotted=True, words=tuple(checks.OWN))] = "exact"
    extract: str = ""
    tokens: Annotated[int, Ge(1)] = 32
    stop: tuple[str, ...] = ("\n",)
    samples: Annotated[int, Ge(1)] = 1
    k: tuple[Annotated[int, Ge(1)], ...] = (1,)
    temperature: Annotated[float, Ge(0)] = 0.0
    top_k: Annotated[int, Ge(0)] = 0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    seed: Annotated[int, Ge(0)] = 0
    items: Mapping[str, str] = dataclasses.field(default_factory=dict)
    delimiter: str = " "
    prefix: str = ""
    shots: Annotated[int, Ge(0)] = 0
    shots_data: Annotated[str, FilePath()] = ""
    separator: str = "\n\n"


Section: TypeAlias = Perplexity | Choice | Generate
KINDS: Mapping[str, type[Any]] = {"perplexity": Perplexity, "choice": Choice, "generate": Generate}


@dataclass(frozen=True)
class TaskFile:
    """A task, with its records.

    Args:
        name: of its table, or of its file.
        where: of messages.
        section: what it says.
        records: all, or as many as were asked for.
        shots: the records of its examples, and one more if there is one: a record is no example of itself.
    """

    name: str
    where: str
    section: Any
    records: Sequence[Record]
    shots: Sequence[Record] = ()


def open_file(path: Path, limit: int) -> list[TaskFile]:
    """The tasks of a file.

    Args:
        path: a TOML file; or a file of records, which is one task with the usual fields.
        limit: records of each, from the beginning; 0 takes all.

    Raises:
        ConfigError: naming the file and the key, or the record.
    """
    if path.suffix != ".toml":
        return [_bare(path, limit)]
    document = read(path)
    if not document.data:
        raise ConfigError(f"{path}: has no task; a table [NAME] with kind and data is one.")
    return [_opened(path, name, table, document.line, limit) for name, table in document.data.items()]


def _bare(path: Path, limit: int) -> TaskFile:
    records = _records(str(path), "--task", limit)
    kind = _kind(records[0])
    for record in records:
        if (other := _kind(record)) != kind:
            raise ConfigError(
                f"{record[0]}: a record of kind {other} after one of kind {kind}; write a file for each kind."
            )
    return TaskFile(path.name.partition(".")[0], str(path), KINDS[kind](kind=kind, data=str(path)), records)


def _kind(record: Record) -> str:
    where, fields = record
    for field, kind in (("choices", "choice"), ("answer", "generate"), ("text", "perplexity")):
        if field in fields:
            return kind
    raise ConfigError(
        f"{where}: a record has a text, or a prompt with an answer, or these two and choices; its fields are "
        f"{', '.join(map(repr, fields)) or 'none'}. A TOML file can name others."
    )


def _opened(path: Path, name: str, table: Any, line: Any, limit: int) -> TaskFile:
    where = f"{path}:{line((name,))}"
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: {name}: expected a table [{name}] with kind and data, found {table!r}.")
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        known = " or ".join(KINDS)
        raise ConfigError(f"{where}: {name}.kind: expected {known}, found {kind!r}.{nearest(str(kind), KINDS)}")
    values = {
        key: Value(value, Origin("file", f"{path}:{line((name, *key))}"))
        for key, value in leaves(table)
        if value is not TABLE
    }
    mistakes: list[str] = []
    made = validate(name, KINDS[kind], values, mistakes)
    mistakes += _wrong(made, name, where) if made is not None else []
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    examples = getattr(made, "shots", 0)
    shots = _records(made.shots_data, f"{where}: {name}.shots_data", examples + 1) if examples else []
    if len(shots) < examples:
        raise ConfigError(
            f"{where}: {name}.shots: {made.shots_data} has {len(shots)} records, fewer than {made.shots}."
        )
    of_items = tuple(getattr(made, "items", {}).values())
    return TaskFile(name, where, made, _records(made.data, f"{where}: {name}.data", limit, of_items), shots)


def _wrong(made: Any, name: str, where: str) -> list[str]:
    """Mistakes that the types of a section do not show."""
    if isinstance(made, Perplexity):
        return []
    found = []
    if bool(made.shots) != bool(made.shots_data):
        found.append(f"{where}: {name}: shots and shots_data go together; give both or neither.")
    if made.items and made.shots:
        found.append(f"{where}: {name}.shots: examples are texts; leave shots out where prompts have items.")
    if isinstance(made, Generate):
        if not all(made.stop):
            found.append(f"{where}: {name}.stop: expected non-empty texts, found {[*made.stop]!r}.")
        if not made.k or max(made.k) > made.samples:
            found.append(
                f"{where}: {name}.k: expected numbers of at most samples = {made.samples}, found {[*made.k]!r}."
            )
        if made.samples > 1 and not made.temperature:
            found.append(f"{where}: {name}.samples: {made.samples} answers are all alike with temperature = 0.")
        try:
            re.compile(made.extract)
        except re.error as error:
            found.append(f"{where}: {name}.extract: {made.extract!r} is no pattern: {error}.")
    return found


def _records(data: str, key: str, limit: int, of_items: Sequence[str] = ()) -> list[Record]:
    found: list[Record] = []
    for file in find(data, key=key):
        form, folder = lookup(file.suffix, file.label), posixpath.dirname(file.address)
        for place, record in form.read(file, whole(form.parts(file))):
            items = {name: in_folder(record[name], folder) for name in of_items if name in record}
            found.append((file.at(place), {**record, **items}))
            if len(found) == limit:
                return found
    if not found:
        raise ConfigError(f"{key}: {data} has no record.")
    return found


def filled(template: str, record: Record, name: str) -> str:
    """A template with the fields of a record in it.

    Raises:
        ConfigError: it is no template, or the record has no such field.
    """
    pieces = []
    try:
        parsed = [*string.Formatter().parse(template)]
    except ValueError as error:
        raise ConfigError(f"{name}: {template!r} is no template: {error}; write {{{{ for a brace.") from error
    for text, field, form, conversion in parsed:
        pieces.append(text)
        if field is None:
            continue
        if form or conversion:
            raise ConfigError(f"{name}: {template!r}: a template has {{field}} alone, without a format.")
        pieces.append(text_of(field, record))
    return utf8_text("".join(pieces), record[0])


def value_of(field: str, record: Record) -> Any:
    """A field of a record.

    Raises:
        ConfigError: it has none of that name.
    """
    where, fields = record
    if field not in fields:
        there = ", ".join(map(repr, fields)) or "none"
        raise ConfigError(f"{where}: has no field {field!r}; the fields are {there}.{nearest(field, fields)}")
    return fields[field]


def text_of(field: str, record: Record) -> str:
    """A field of a record, a text or a number.

    Raises:
        ConfigError: it has none of that name, or it is neither.
    """
    value = value_of(field, record)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigError(f"{record[0]}: {field!r}: expected a text, found {value!r}.")
    return utf8_text(str(value), record[0])


def utf8_text(text: str, where: str) -> str:
    """A text that can be encoded.

    Raises:
        ConfigError: it can't.
    """
    utf8(text, where)
    return text

"""Tasks of local files: their questions, and the worth of the answers."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from forge_train.base.errors import ConfigError

from . import checks
from .generating import Answer, Generation
from .results import Metric, TaskResult
from .scoring import Score
from .task_files import Choice, Generate, Perplexity, Record, TaskFile, filled, text_of, value_of

Sample = dict[str, Any]
"""A record's requests and answers, as `--samples` writes them."""


@dataclass(frozen=True)
class Questions:
    """Questions of a task: continuations after contexts, whole texts, and prompts."""

    pairs: Sequence[tuple[str, str]] = ()
    texts: Sequence[str] = ()
    prompts: Sequence[Generation] = ()
    shown: Sequence[Mapping[str, list[Any]]] = ()
    """Items of the contexts of `pairs`, by modality; empty if none has some."""


@dataclass(frozen=True)
class Answers:
    """The answers, in the order of the questions."""

    pairs: Sequence[Score] = ()
    texts: Sequence[Score] = ()
    prompts: Sequence[Answer] = ()


class LocalTask(Protocol):
    """A task whose questions are known before anything is computed."""

    file: TaskFile
    questions: Questions
    measure: Any
    """The measure of answers, as JSON: results that were measured otherwise are not compared."""

    def result(self, answers: Answers) -> tuple[dict[str, Metric], list[Sample]]:
        """The metrics, and a sample for each record."""
        ...


def prepare(file: TaskFile) -> LocalTask:
    """The questions of a task.

    Raises:
        ConfigError: naming the record that can't be asked.
    """
    kinds: Mapping[type, Any] = {Perplexity: _Perplexity, Choice: _Choice, Generate: _Generate}
    made: LocalTask = kinds[type(file.section)](file)
    return made


def summary(task: LocalTask, metrics: Mapping[str, Metric], answers: Answers) -> TaskResult:
    """The result of a task, from its metrics."""
    file, asked = task.file, task.questions
    prompts = [{name: value for name, value in vars(one).items() if value != {}} for one in asked.prompts]
    whole = [asked.pairs, asked.texts, prompts, task.measure, *([asked.shown] if asked.shown else [])]
    text = json.dumps(whole, ensure_ascii=False, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    cut = sum(bool(one.cut) for one in answers.pairs) + sum(bool(one.cut) for one in answers.prompts)
    return TaskResult(
        file.name, file.section.kind, digest, len(file.records), getattr(file.section, "shots", 0), cut, metrics
    )


@dataclass
class _Perplexity:
    file: TaskFile
    questions: Questions = field(init=False)
    measure: Any = None

    def __post_init__(self) -> None:
        self._texts = [text_of(self.file.section.field, record) for record in self.file.records]
        for (where, _), text in zip(self.file.records, self._texts, strict=True):
            if not text.strip():
                raise ConfigError(f"{where}: the text is empty; leave it out.")
        self.questions = Questions(texts=self._texts)

    def result(self, answers: Answers) -> tuple[dict[str, Metric], list[Sample]]:
        found = [one.log_likelihood for one in answers.texts]
        sizes = {
            "token": [one.tokens for one in answers.texts],
            "byte": [len(text.encode()) for text in self._texts],
            "word": [len(text.split()) for text in self._texts],
        }
        metrics = {f"{unit}_perplexity": Metric.perplexity(found, size) for unit, size in sizes.items()}
        metrics["bits_per_byte"] = Metric.bits(found, sizes["byte"])
        samples = [
            {"text": text, "log_likelihood": one, **{f"{unit}s": size[at] for unit, size in sizes.items()}}
            for at, (text, one) in enumerate(zip(self._texts, found, strict=True))
        ]
        return metrics, samples


@dataclass
class _Choice:
    file: TaskFile
    questions: Questions = field(init=False)
    measure: Any = field(init=False)

    def __post_init__(self) -> None:
        made: Choice = self.file.section
        self._choices = [_choices(self.file, record) for record in self.file.records]
        self._right = [
            _right(made, record, choices) for record, choices in zip(self.file.records, self._choices, strict=True)
        ]
        self.measure = [self._choices, self._right]
        self._prompts = _prompts(self.file, lambda record: _right_text(self.file, record))
        shown = [_items(made, record) for record in self.file.records if made.items]
        self.questions = Questions(
            pairs=[
                (prompt, made.delimiter + choice)
                for prompt, choices in zip(self._prompts, self._choices, strict=True)
                for choice in choices
            ],
            shown=[items for items, choices in zip(shown, self._choices, strict=False) for _ in choices],
        )

    def result(self, answers: Answers) -> tuple[dict[str, Metric], list[Sample]]:
        scores = iter(answers.pairs)
        each: dict[str, list[float]] = {"accuracy": [], "accuracy_per_character": [], "accuracy_per_byte": []}
        samples = []
        for prompt, choices, right in zip(self._prompts, self._choices, self._right, strict=True):
            found = [next(scores).log_likelihood for _ in choices]
            sizes = ([1] * len(choices), [*map(len, choices)], [len(one.encode()) for one in choices])
            chosen = [_likeliest(found, size) for size in sizes]
            for values, one in zip(each.values(), chosen, strict=True):
                values.append(float(one in right))
            samples.append(
                {"prompt": prompt, "choices": choices, "log_likelihoods": found, "answer": right, "chosen": chosen[0]}
            )
        return {name: Metric.mean(values) for name, values in each.items()}, samples


@dataclass
class _Generate:
    file: TaskFile
    questions: Questions = field(init=False)
    measure: Any = field(init=False)

    def __post_init__(self) -> None:
        made: Generate = self.file.section
        self._check = checks.find(made.check, f"{self.file.where}: {self.file.name}.check")
        own = made.check in checks.OWN
        there = [own or made.answer in record[1] for record in self.file.records]
        self._right = [
            _answers(made, one) if known else [] for one, known in zip(self.file.records, there, strict=True)
        ]
        measured = self._right if own else [fields for _, fields in self.file.records]
        self.measure = [measured, checks.text(made.check, self._check), made.extract, made.k]
        self._prompts = _prompts(self.file, lambda record: _answers(made, record)[0])
        how = {name: getattr(made, name) for name in ("tokens", "stop", "temperature", "top_p", "top_k", "seed")}
        self.questions = Questions(
            prompts=[
                Generation(prompt, **how, draw=(number, sample), items=_items(made, record))
                for number, (prompt, record) in enumerate(zip(self._prompts, self.file.records, strict=True))
                for sample in range(made.samples)
            ]
        )

    def result(self, answers: Answers) -> tuple[dict[str, Metric], list[Sample]]:
        made: Generate = self.file.section
        written = iter(answers.prompts)
        samples, right = [], []
        for prompt, known, (_, record) in zip(self._prompts, self._right, self.file.records, strict=True):
            found = [next(written) for _ in range(made.samples)]
            taken = [_extracted(made.extract, one.text) for one in found]
            marks = [self._check(one, known, record) for one in taken]
            right.append(marks)
            stopped = [one.stopped for one in found]
            texts = [one.text for one in found]
            samples.append({"prompt": prompt, "answers": texts, "stopped": stopped, "answer": known, "right": marks})
        metrics = {"accuracy": Metric.mean([sum(marks) / len(marks) for marks in right])}
        if made.samples > 1:
            metrics |= {f"pass@{k}": Metric.mean([pass_at(k, marks) for marks in right]) for k in made.k}
        return metrics, samples


def pass_at(k: int, marks: Sequence[float]) -> float:
    """The unbiased estimate that one of k answers is right (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    right = sum(mark == 1 for mark in marks)
    return 1.0 - math.comb(len(marks) - right, k) / math.comb(len(marks), k)


def _prompts(file: TaskFile, answer: Callable[[Record], str]) -> list[str]:
    """The prompt of each record, after the prefix and the examples, of which the record itself is none."""
    made = file.section

    @cache
    def example(at: int) -> str:
        one = file.shots[at]
        return f"{filled(made.prompt, one, file.where)}{made.delimiter}{answer(one)}{made.separator}"

    prompts = []
    for place, fields in file.records:
        others = [at for at, (_, other) in enumerate(file.shots) if other != fields][: made.shots]
        if len(others) < made.shots:
            raise ConfigError(
                f"{place}: {file.name}.shots: without this record, the first {len(file.shots)} of {made.shots_data} "
                f"are fewer than {made.shots}; ask for fewer, or take examples of another file."
            )
        before = made.prefix + "".join(map(example, others))
        prompts.append(before + filled(made.prompt, (place, fields), file.where))
    return prompts


def _items(made: Choice | Generate, record: Record) -> dict[str, list[Any]]:
    """The items of a prompt, by modality."""
    found = {name: value_of(field_, record) for name, field_ in made.items.items()}
    return {name: value if isinstance(value, list) else [value] for name, value in found.items()}


def _likeliest(found: Sequence[float], sizes: Sequence[int]) -> int:
    return max(range(len(found)), key=lambda at: found[at] / sizes[at])


def _choices(file: TaskFile, record: Record) -> list[str]:
    made = file.section
    if isinstance(made.choices, str):
        found = value_of(made.choices, record)
    else:
        found = [filled(one, record, file.where) for one in made.choices]
    if not isinstance(found, list) or len(found) < 2 or not all(isinstance(one, str) and one for one in found):
        raise ConfigError(f"{record[0]}: choices: expected at least two texts, found {found!r}.")
    return found


def _right(made: Choice, record: Record, choices: Sequence[str]) -> list[int]:
    """The numbers of the right choices."""
    value = value_of(made.answer, record)
    found = []
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, int) and not isinstance(one, bool) and 0 <= one < len(choices):
            found.append(one)
        elif isinstance(one, str) and one in choices:
            found.append([*choices].index(one))
        else:
            raise ConfigError(
                f"{record[0]}: {made.answer!r}: expected a number from 0 to {len(choices) - 1} or one of the choices, "
                f"found {one!r}."
            )
    if not found:
        raise ConfigError(f"{record[0]}: {made.answer!r}: there is no right choice.")
    return found


def _right_text(file: TaskFile, record: Record) -> str:
    choices = _choices(file, record)
    return choices[_right(file.section, record, choices)[0]]


def _answers(made: Generate, record: Record) -> list[str]:
    value = value_of(made.answer, record)
    values = value if isinstance(value, list) else [value]
    for one in values if made.check in checks.OWN else ():
        if isinstance(one, bool) or not isinstance(one, (str, int, float)):
            raise ConfigError(f"{record[0]}: {made.answer!r}: expected a text or a number, found {one!r}.")
        if checks.is_empty(made.check, str(one)):
            raise ConfigError(
                f"{record[0]}: {made.answer!r}: to check = {made.check!r} the right answer {one!r} is empty, as is an "
                "answer that is not there; give another."
            )
    found = [str(one) for one in values if isinstance(one, (str, int, float))]
    if not found:
        raise ConfigError(f"{record[0]}: {made.answer!r}: there is no right answer.")
    if made.check == "regex":
        for one in found:
            try:
                re.compile(one)
            except re.error as error:
                raise ConfigError(f"{record[0]}: {made.answer!r}: {one!r} is no pattern: {error}.") from error
    return found


def _extracted(pattern: str, text: str) -> str:
    """The part of a text that a pattern finds; nothing if it finds nothing."""
    if not pattern:
        return text
    found = re.search(pattern, text)
    return "" if found is None else found[1] if found.re.groups and found[1] is not None else found[0]

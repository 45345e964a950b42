"""`forge infer`: one forward pass over the records of a data set, on one process or a layout of several."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from forge_train.base.errors import ConfigError
from forge_train.compose.compose import compose
from forge_train.contract.model import Model
from forge_train.contract.protocols import Evaluator
from forge_train.loop.assembly import prepared
from forge_train.loop.weights import load_extra
from forge_train.mesh.layout import Layout
from forge_train.plugin.job import Job
from forge_train.step.forward import Forward
from forge_train_kit import foreign, hookspecs

from ..launching.launch import WorkerCommand, launch
from ..launching.world import here
from ..offline.opening import Source, Wanted, find, run_folder
from ..offline.read_only import ReadOnlyRun
from .batches import Batches
from .forms import Form, form_of
from .identity import values_of, weights_of
from .output_file import OutputFile
from .outputs import LOG_LIKELIHOOD, Collector, choose
from .records import Long, Records, Tokens

CHUNK = 16
"""Micro-batches of each data-parallel rank between two writes."""
_UNLIMITED = 1 << 31


class InferenceOptions(TypedDict, total=False):
    """Some fields of `Inference`, as keywords."""

    field: str
    long: Long
    batch: int


@dataclass(frozen=True, kw_only=True)
class Inference:
    """A forward-only job, as it was asked for.

    Args:
        path: a run, a checkpoint or a Hugging Face folder.
        data: files, folders, patterns or addresses.
        out: the file to write, which does not exist: .jsonl, .parquet or .safetensors.
        outputs: names; empty for what fits the head.
        field: of records that holds the text; empty for `text`, or `prompt` and `completion`.
        long: treatment of records that are longer than what the model reads at once.
        batch: records of a micro-batch.
        plugins: to enable too; so is `set`, values to override.
    """

    path: Path
    data: tuple[str, ...]
    out: Path
    outputs: tuple[str, ...] = ()
    field: str = ""
    long: Long = "refuse"
    batch: int = 8
    plugins: tuple[str, ...] = ()
    set: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"--batch: expected at least 1, found {self.batch}.")
        form_of(self.out)

    def source(self, world: int) -> Source:
        """The weights, and a configuration whose global batch has a micro-batch for each stage of each data-parallel
        rank."""
        source = self._source(world, self.batch * world)
        layout = Layout.of(source.setup.config.parallel, world)
        together = layout.dp * layout.pp
        return source if together == world else self._source(world, self.batch * together)

    def _source(self, world: int, together: int) -> Source:
        sizes = (f"train.micro_batch={self.batch}", f"train.global_batch={together}")
        return find(self.path, world=world, wanted=Wanted(self.plugins, (*sizes, *self.set), data=False))


@dataclass(frozen=True)
class Inferred:
    """Results of a forward-only job."""

    checkpoint: str
    step: int
    world: int
    out: str
    records: int
    tokens: int = 0
    """Tokens of the records that this command read, padding left out."""
    seconds: float = 0.0
    not_finite: int = 0
    """Records whose outputs are not all finite, of those that this command read."""
    cut: int = 0
    """Records that were cut on their left, likewise."""


def infer(asked: Inference, *, nproc: int = 1, told: Callable[[str], None] = lambda text: None) -> Inferred:
    """Write the outputs of a model for each record, in the order of the records.

    A command that was killed continues where it was, on any layout.

    Args:
        asked: the job.
        nproc: local processes to use, including this one.
        told: is given a line about how far it is; only with one process.

    Raises:
        ConfigError: for a path, a record, an output or a file that can't be, before anything is computed.
        ForgeError: with the message of the rank that failed first.
    """
    if nproc == 1:
        return _infer(asked, told)
    asked.source(nproc)  # so that a mistake is reported only once
    with tempfile.TemporaryDirectory(prefix="forge-infer-") as name:
        folder = Path(name)
        arguments = dataclasses.asdict(asked) | {"path": str(asked.path), "out": str(asked.out)}
        command = WorkerCommand(
            f"{__name__}:worker", {"asked": arguments}, folder / "launch", folder / "log", quiet=True
        )
        ended = launch(command, nproc)
        ended.check()
    return Inferred(**ended.result["inferred"])


def worker(asked: dict[str, Any]) -> dict[str, Any]:
    """The work of each process."""
    tuples = {name: tuple(asked[name]) for name in ("data", "outputs", "plugins", "set")}
    paths = {name: Path(asked[name]) for name in ("path", "out")}
    return {"code": 0, "inferred": dataclasses.asdict(_infer(Inference(**(asked | tuples | paths))))}


def _infer(asked: Inference, told: Callable[[str], None] = lambda text: None) -> Inferred:
    """Do it on this process alone, or on one of those that a launcher started."""
    world = here().size
    source = asked.source(world)
    with prepared(source.setup, ReadOnlyRun(run_folder(source.path))) as job:
        if not job.hooks.provider("tokenizer"):
            raise ConfigError(f"{asked.path}: this model has no tokenizer, which records of text need.")
        model, tokenizer = compose(job).model, hookspecs.tokenizer(job)
        forward = Forward(job, model)
        chosen = choose(job, forward.task, model, asked.outputs)
        collector = Collector(job, chosen)
        scored = LOG_LIKELIHOOD in chosen.names
        records = Records(asked.data, asked.field, _longest(model), asked.long, scored=scored)
        made_of = {
            "model": weights_of(source, job.dist),
            "configuration of the model": values_of(job),
            "tokenizer": tokenizer.digest,
            "content of --data": job.dist.on_main(lambda: records.digest),
            "--outputs": " ".join(chosen.names),
            "--batch": str(asked.batch),
            "train.precision": job.config.train.precision,
        }
        count = job.dist.on_main(lambda: records.check(tokenizer))
        form = form_of(asked.out)
        with _opened(asked.out, made_of, form, job, told) as (out, done):
            load_extra(job, locate=foreign.resolve)
            source.load(model, job)
            batches = Batches(records, job, tokenizer, asked.batch, done, documents=not _of_tokens(job))
            written = _Written()
            while done < count:
                steps = min(CHUNK, -(-(count - done) // (asked.batch * job.dist.data_ranks)))
                evaluator = Evaluator("infer", lambda: batches, collector.measure, {})
                with collector.watched(model):
                    forward.measure(evaluator, batches, steps, "forge infer")
                lines = written.add(_gathered(job, collector, batches, form))
                done += len(lines)
                job.dist.on_main(partial(_add, out, lines))
                told(f"{done:,} of {count:,} records · {written.speed:,.0f} tokens/s")
            job.dist.on_main(lambda: out.finish() if out else None)
        return written.result(Inferred(str(source.path), source.step, world, str(asked.out), count))


@contextmanager
def _opened(
    path: Path, made_of: dict[str, str], form: Form, job: Job, told: Callable[[str], None]
) -> Iterator[tuple[OutputFile | None, int]]:
    """The file, on the main process, and how many records it has."""
    here: list[OutputFile] = []
    with ExitStack() as stack:

        def begin() -> int:
            here.append(stack.enter_context(OutputFile.open(path, made_of, told, form)))
            return here[0].done

        done = job.dist.on_main(begin)
        yield (here[0] if here else None), done


def _add(out: OutputFile | None, lines: list[dict[str, Any]]) -> None:
    if out is not None:
        out.add(lines)


def _gathered(job: Job, collector: Collector, batches: Batches, form: Form) -> list[tuple[dict[str, Any], Tokens]]:
    """The lines of the records that all ranks have read, in order; on every rank."""
    found: dict[int, tuple[Tokens, dict[str, dict[str, Any]]]] = {}
    mine = {
        number: (batches.taken[number], {output: _kept(fields, form) for output, fields in outputs.items()})
        for number, outputs in collector.found.items()
    }
    for part in job.dist.gather_objects(mine):
        for number, (one, outputs) in part.items():
            found.setdefault(number, (one, {}))[1].update(outputs)
    collector.found.clear()
    batches.taken.clear()
    return [(_line(*found[number], collector.chosen.names), found[number][0]) for number in sorted(found)]


def _kept(fields: Mapping[str, Any], form: Form) -> dict[str, Any]:
    return {name: form.value(value) for name, value in fields.items()}


def _line(one: Tokens, outputs: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """A record's line."""
    fields = {name: value for output in names for name, value in outputs[output].items()}
    cut = {"cut": one.cut} if one.cut else {}
    return {"record": one.number} | ({} if one.id is None else {"id": one.id}) | fields | cut


class _Written:
    """A count of the records that this command has written."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._tokens = self._not_finite = self._cut = 0

    def add(self, found: list[tuple[dict[str, Any], Tokens]]) -> list[dict[str, Any]]:
        """Count some records; gives their lines."""
        for line, one in found:
            self._tokens += len(one.ids)
            self._cut += bool(one.cut)
            self._not_finite += not _finite(line)
        return [line for line, _ in found]

    @property
    def speed(self) -> float:
        """Tokens in a second."""
        return self._tokens / max(time.monotonic() - self._began, 1e-9)

    def result(self, found: Inferred) -> Inferred:
        seconds = time.monotonic() - self._began
        return replace(found, tokens=self._tokens, seconds=seconds, not_finite=self._not_finite, cut=self._cut)


def _longest(model: Model) -> int:
    """Tokens that the model reads at once."""
    return min((int(getattr(part, "max_sequence", _UNLIMITED)) for part in model.parts), default=_UNLIMITED)


def _of_tokens(job: Job) -> bool:
    return job.hooks.gives("head") == "token_logits"


def _finite(value: Any) -> bool:
    """True if every number in it is finite."""
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    if isinstance(value, np.ndarray):
        return bool(np.isfinite(value).all())
    return not isinstance(value, float) or math.isfinite(value)

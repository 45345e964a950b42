"""`forge infer`: one forward pass over the records of a data set, on one process or a layout of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError
from forge_train.compose.compose import compose
from forge_train.contract.model import Model
from forge_train.plugin.job import Job
from forge_train.step.forward import Forward
from forge_train_kit import hookspecs
from forge_train_kit.contract import Evaluator
from forge_train_kit.data.items import prompts_of
from forge_train_kit.evaluators import measure
from forge_train_kit.starting import load_extra

from ..launching.once import launch_once
from ..launching.world import here
from ..offline.opening import Source, run_folder
from ..offline.read_only import ReadOnlyRun
from ..process import prepared
from .asked import Inference, InferenceOptions, Inferred
from .batches import Batches
from .chats import Chats
from .counted import Counted
from .encoding import Encoder
from .forms import Form, form_of
from .identity import values_of, weights_of
from .lines import Found, Lines
from .output_file import OutputFile, note_checked, records_checked
from .outputs import LOG_LIKELIHOOD, PER_TOKEN, Chosen, Collector, choose
from .records import Records
from .share import Share

__all__ = ["Inference", "InferenceOptions", "Inferred", "infer"]

CHUNK = 16
"""Micro-batches of each data-parallel rank between two writes, times outputs: they are in memory on every rank."""
_UNLIMITED = 1 << 31


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
    arguments = dataclasses.asdict(asked) | {"path": str(asked.path), "out": str(asked.out)}
    return Inferred(**launch_once(f"{__name__}:worker", {"asked": arguments}, nproc)["inferred"])


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
        forward = Forward(job, compose(job).model)
        chosen, form = choose(job, forward.task, forward.model, asked.outputs), form_of(asked.out)
        _check(chosen, form, asked)
        encode = _encoder(asked, chosen, forward.model, job, source)
        records = Records(asked.data)
        made_of = {
            "model": weights_of(source, job.dist),
            "configuration of the model": values_of(job),
            "tokenizer": encode.tokenizer.digest,
            "chat template": encode.chats.digest,
            "content of --data": job.dist.on_main(lambda: records.digest),
            "--field": encode.field,
            "--long": encode.long,
            "longest record that the model reads": str(encode.longest),
            "--outputs": " ".join(chosen.names),
            "--batch": str(asked.batch),
            "train.precision": job.config.train.precision,
        }
        known = job.dist.on_main(lambda: records_checked(asked.out, made_of))
        share = Share(records, encode, job, asked.batch, known)
        if share.windowed or not known:
            share.check()
            if asked.template and not any(job.dist.gather_objects(encode.chats.used)):
                raise ConfigError("--template: no record is read as a chat; leave it out.")
        with _opened(asked, made_of, form, share.count, job, told) as (out, done):
            load_extra(job)
            source.load(forward.model, job)
            counted = Counted()
            for lines in _computed(share, chosen, form, forward, asked.batch, done):
                written = counted.add(lines)
                job.dist.on_main(partial(_add, out, written))
                done += len(written)
                told(f"{done:,} of {share.count:,} records · {counted.speed:,.0f} tokens/s")
            job.dist.on_main(lambda: out.finish() if out else None)
        return counted.result(Inferred(str(source.path), source.step, world, str(asked.out), share.count))


def _check(chosen: Chosen, form: Form, asked: Inference) -> None:
    """Refuse outputs that do not go with other options."""
    if PER_TOKEN in chosen.names and not form.lists:
        raise ConfigError(
            f"--outputs: {PER_TOKEN} gives lists of many lengths, which {asked.out} can't hold; write .parquet or "
            ".jsonl."
        )
    summed = (LOG_LIKELIHOOD, PER_TOKEN)
    if asked.long == "windows" and (others := [name for name in chosen.names if name not in summed]):
        raise ConfigError(
            f"--long windows: {others[0]} is of a record as a whole, and only {' and '.join(summed)} add up over "
            "windows. Ask for these, or cut long records: --long left."
        )


def _encoder(asked: Inference, chosen: Chosen, model: Model, job: Job, source: Source) -> Encoder:
    longest = min((int(getattr(part, "max_sequence", _UNLIMITED)) for part in model.parts), default=_UNLIMITED)
    located = PER_TOKEN in chosen.names
    scored = located or LOG_LIKELIHOOD in chosen.names
    items, chats = prompts_of(job), Chats(job, source.path, asked.template)
    return Encoder(
        hookspecs.tokenizer(job) if items is None else items.tokenizer,
        chats,
        asked.field,
        longest,
        asked.long,
        scored=scored,
        located=located,
        items=items,
    )


def _computed(
    share: Share, chosen: Chosen, form: Form, forward: Forward, size: int, done: int
) -> Iterator[list[tuple[dict[str, Any], Found]]]:
    """Yield the lines of all records after the first `done`, in order, some at a time."""
    job, encode = forward.job, share.encode
    start = share.first_row(done) // size * size
    of_tokens = job.hooks.gives("head") == "token_logits"
    pad = encode.tokenizer.end or 0
    none = None if encode.items is None else encode.items.none
    batches = Batches(
        share, job, size, longest=encode.longest, pad=pad, start=start, documents=not of_tokens, no_items=none
    )
    collector, lines = Collector(job, chosen), Lines(job, share, chosen.names, form)
    evaluator = Evaluator("infer", lambda: batches, collector.measure, {})
    chunk = max(CHUNK // len(chosen.names), 1)
    while done < share.count:
        steps = min(chunk, -(-(share.total - batches.position) // (size * job.dist.data_ranks)))
        with collector.watched(forward.model):
            measure(forward, evaluator, batches, steps, "forge infer")
        found = lines.take(collector, batches, done)
        done += len(found)
        yield found


@contextmanager
def _opened(
    asked: Inference, made_of: Mapping[str, str], form: Form, count: int, job: Job, told: Callable[[str], None]
) -> Iterator[tuple[OutputFile | None, int]]:
    """The file, on the main process, and how many records it has."""
    here: list[OutputFile] = []
    with ExitStack() as stack:

        def begin() -> int:
            here.append(stack.enter_context(OutputFile.open(asked.out, made_of, told, form)))
            note_checked(asked.out, made_of, count)
            return here[0].done

        done = job.dist.on_main(begin)
        yield (here[0] if here else None), done


def _add(out: OutputFile | None, lines: list[dict[str, Any]]) -> None:
    if out is not None:
        out.add(lines)

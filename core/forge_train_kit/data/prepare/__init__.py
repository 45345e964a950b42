"""Any source to token shards: on all cores, in bounded memory, resumed after a kill, the same with any workers.

What is read is divided into tasks before anything is read, by the files' names and sizes alone. Each task writes its
own shards and then a note of them; the manifest comes last. So whoever runs the same preparation again does the tasks
that have no note, and which worker did a task, or when, can't be seen in the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from forge_train import ConfigError
from forge_train_kit import model_files

from ..cache import cache_folder
from ..chats import check_used
from ..files import File, find
from ..held_out import SIDES
from ..manifest import FILE, TOKENIZER, WORK, Listed, Manifest, read_manifest
from ..maps import Maps
from ..tokenizers import BYTES, open_tokenizer, pieces, special
from . import pool, training
from .encoding import Maker
from .progress import Report, Told
from .tasks import TEXT, Preparation, Task, divide, matches
from .worker import Done, done, task_name

__all__ = ["Preparation", "Report", "Told", "cache_folder", "prepare", "settled"]


def prepare(wanted: Preparation, report: Report, *, key: str = "SOURCE", wait: bool = False) -> Manifest:
    """Make a folder of token shards.

    Args:
        wanted: what to make, and of what.
        report: is told how far it is.
        key: the configuration key or argument that named the sources, for messages.
        wait: whether to wait for another process that makes the same folder, instead of refusing.

    Raises:
        ConfigError: the sources can't be read, hold nothing, or the folder holds something else.
    """
    if not 0 <= wanted.held_out < 1:
        raise ConfigError(f"--held-out: expected a share from 0 up to 1, found {wanted.held_out}.")
    files = _files(wanted, key)
    if wanted.train_tokenizer:
        training.check(wanted)
        Maps(wanted.maps)
    else:
        Maker.of(wanted, wanted.tokenizer)
    unreadable: dict[str, str] = {}
    tasks = divide(files, unreadable if wanted.skip else None)
    with _claimed(wanted.out, wanted.settings(files), wait) as work:
        tokenizer = _tokenizer(wanted, work, tasks, report)
        Maker.of(wanted, tokenizer)  # what does not fit is told before anything is read
        known = [done(work, wanted.out, task, verify=not wait) for task in tasks]
        left = [task for task, found in zip(tasks, known, strict=True) if found is None]
        report.begin(tasks, left)
        if not left and (wanted.out / FILE).is_file():
            report.end(unreadable | _skipped(known))
            return read_manifest(wanted.out, key=key)
        if left:
            pool.run(wanted, tokenizer, left, report)
        results = [_required(done(work, wanted.out, task), task) for task in tasks]
        skipped = _skipped(results)
        if all(result.used is not None for result in results):
            used = {name for result in results for name in result.used or ()}
            check_used(wanted.rename, wanted.roles, used, wanted.key(""))
        manifest = Manifest(
            tokenizer=_described(tokenizer),
            settings=wanted.public(),
            sources={"entries": list(wanted.sources), "files": len(files)},
            shards={side: tuple(_listed(results, side)) for side in SIDES},
        )
        if not manifest.total("tokens"):
            number = "1 file" if len(files) == 1 else f"{len(files):,} files"
            after = f" after --map {' '.join(wanted.maps)}" if wanted.maps else ""
            reason = f"; all is left out, such as: {next(iter(skipped.values()))}" if skipped else "."
            raise ConfigError(f"{key}: there is no text in {number}{after}{reason}")
        manifest.write(wanted.out)
    report.end(unreadable | skipped, manifest.total("bytes"))
    return manifest


def _files(wanted: Preparation, key: str) -> list[File]:
    for source in wanted.sources:
        if (Path(source) / FILE).is_file() and (Path(source) / WORK).is_dir():
            raise ConfigError(f"{key}: {source} is a folder of token shards already: train on it with tokens.path.")
    files = find(wanted.sources, key=key)
    if wanted.field != "text" and not wanted.chat and all(file.suffix in TEXT for file in files):
        raise ConfigError("--field: has no effect: there are no records in plain text.")
    for pattern, name in wanted.fields:
        if not name or not any(matches(pattern, file) for file in files if file.suffix not in TEXT):
            raise ConfigError(f"--field {pattern}={name}: expected FILES=NAME, and no file of records is {pattern!r}.")
    return files


def _required(found: Done | None, task: Task) -> Done:
    if found is None:
        raise ConfigError(f"The shards of {task_name(task)} went away while others were written: run it again.")
    return found


def _skipped(results: Sequence[Done | None]) -> dict[str, str]:
    """Files and records that were left out, and why."""
    return {place: reason for result in results if result for place, reason in result.skipped.items()}


def _listed(results: list[Done], side: str) -> Iterator[Listed]:
    for result in results:
        if (header := result.headers.get(side)) is not None:
            yield Listed(f"{side}-{task_name(result.number)}.tokens", header)


def _described(tokenizer: str) -> dict[str, object]:
    opened = open_tokenizer(tokenizer)
    path = BYTES if tokenizer == BYTES else TOKENIZER
    return {"path": path, "digest": opened.digest, "vocabulary": opened.vocabulary, "end": opened.end}


def _tokenizer(wanted: Preparation, work: Path, tasks: list[Task], report: Report) -> str:
    """The tokenizer's path: bytes, or its files in the folder, copied or trained."""
    folder = wanted.out / TOKENIZER
    if wanted.train_tokenizer:
        if not folder.is_dir():
            training.train(wanted, tasks, folder, report)
        return str(folder)
    if wanted.tokenizer == BYTES:
        return BYTES
    path = Path(wanted.tokenizer).expanduser()
    opened = open_tokenizer(wanted.tokenizer)
    if not folder.is_dir():
        found = model_files.files(path)
        alone = pieces.FILE if path.suffix == pieces.SUFFIX else model_files.TOKENIZER
        model_files.copy({alone: path} if len(found) == 1 and path.is_file() else found, folder)
    if open_tokenizer(str(folder)).digest != opened.digest:
        raise ConfigError(f"--tokenizer: {path} is not the tokenizer that {wanted.out} was begun with.")
    return str(folder)


@contextlib.contextmanager
def _claimed(out: Path, settings: str, wait: bool) -> Iterator[Path]:
    """The folder's own work folder, for one process at a time.

    Raises:
        ConfigError: somebody else prepares it now, it was begun with something else, or it holds other files.
    """
    work = out / WORK
    plan = work / "plan.json"
    try:
        if out.exists() and not work.is_dir() and any(one.name != WORK for one in out.iterdir()):
            what = "a folder of other files" if not (out / FILE).is_file() else "a preparation that was cleaned up"
            raise ConfigError(f"--out: {out} is {what}; choose a folder that is empty or not there yet.")
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("a")
    except OSError as error:
        raise ConfigError(f"--out: {out} can't be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise ConfigError(f"--out: {out} is being prepared by another process.") from error
        begun = (out / FILE).is_file() or any(work.glob("[0-9]*.json"))
        if begun and plan.is_file() and (known := plan.read_text(encoding="utf-8")) != settings:
            raise ConfigError(
                f"--out: {out} was begun with something else ({_difference(known, settings)}). {_WAY_OUT}"
            )
        if not begun or not plan.is_file():
            if (out / FILE).is_file():
                read_manifest(out, key="--out")
            part = plan.with_suffix(".part")
            part.write_text(settings, encoding="utf-8")
            part.replace(plan)
        yield work


_WAY_OUT = "Choose another folder, delete that one, or give what it was begun with."


def _difference(known: str, wanted: str) -> str:
    try:
        old, new = json.loads(known), json.loads(wanted)
        changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        files = [one for one in [*old["files"], *new["files"]] if one not in old["files"] or one not in new["files"]]
        return ", ".join(f"files, such as {files[0][0]}" if key == "files" else key for key in changed)
    except (ValueError, KeyError, TypeError, IndexError):
        return "its plan is damaged"


def settled(wanted: Preparation, cache: str, name: str) -> Preparation:
    """The same preparation in a cache, in a folder of its own.

    Args:
        wanted: what to make.
        cache: the cache's folder; empty for the user's.
        name: of the plugin that has it.
    """
    settings = wanted.settings(find(wanted.sources, key=f"{wanted.section or name}.path"))
    identity = hashlib.blake2b(settings.encode(), digest_size=16)
    for file in _deciding(wanted):
        identity.update(file.read_bytes())
    place = Path(wanted.tokenizer).expanduser()
    if wanted.tokenizer != BYTES and (place.is_dir() or place.name == model_files.TOKENIZER):
        identity.update(repr(special.deciding(place if place.is_dir() else place.parent)).encode())
    return dataclasses.replace(wanted, out=cache_folder(cache, name) / identity.hexdigest())


def _deciding(wanted: Preparation) -> list[Path]:
    """Files of the tokenizer and the template whose whole content decides the tokens. Of `config.json` and
    `generation_config.json` only some values do."""
    path = Path(wanted.tokenizer).expanduser()
    found = {} if wanted.tokenizer == BYTES else model_files.files(path)
    later = (special.MODEL_CONFIG, special.GENERATION_CONFIG)
    chosen = [Path(wanted.template)] if wanted.template and Path(wanted.template).is_file() else []
    return [*(file for name, file in found.items() if name not in later), *chosen]

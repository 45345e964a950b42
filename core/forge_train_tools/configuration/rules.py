"""Rules between values that a run of the kernel alone refuses, or does not look at."""

from __future__ import annotations

from collections.abc import Iterator

from forge_train.base.errors import Problem, nearest
from forge_train.base.names import canonical
from forge_train.config import Config

LONGEST_NAME = 200
"""Bytes of a run's name. File systems allow 255, and `--resume never` adds a number."""


def problems(config: Config) -> Iterator[Problem]:
    """Mistakes in the kernel's sections that only several values together show."""
    if problem := _name_problem(config.run.name):
        yield Problem("run.name", problem)
    sections, keys = {*config.everything()}, [*config.values()]
    for name in config.checkpoint.allow_changes:
        section, dot, _ = canonical(name).partition(".")
        if dot and section in sections and canonical(name) not in keys:
            yield Problem("checkpoint.allow_changes", f"there is no key {name!r}.{nearest(canonical(name), keys)}")
    saves = config.checkpoint
    if saves.best.startswith("evaluation.") and not config.train.evaluate_every:
        yield Problem("checkpoint.best", f"{saves.best!r} needs evaluations; set train.evaluate_every.")
    for key, changed in {"best_is": saves.best_is != "lowest", "keep_best": saves.keep_best != 1}.items():
        if changed and not saves.best:
            yield Problem(
                f"checkpoint.{key}", "says which checkpoints are the best; name their metric: checkpoint.best."
            )
    if not (train := config.train).init_from:
        needs = {
            "train.init_missing": train.init_missing,
            "train.init_unexpected": train.init_unexpected,
            "train.init_map": train.init_map,
            "checkpoint.only": config.checkpoint.only,
        }
        for key, patterns in needs.items():
            if patterns:
                yield Problem(key, "needs a checkpoint that gives the other weights; set train.init_from.")


def _name_problem(name: str) -> str:
    """Why a run can't have this name; empty if it can. An empty name is none."""
    if name in (".", "..") or "/" in name or "\\" in name:
        return f"expected the name of a folder, found the path {name!r}; its place is --run-dir."
    if name.startswith("."):
        return f"expected a name that does not begin with a dot, found {name!r}: its folder would be hidden."
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        return f"expected a name without quotation marks around it, found {name}; write --set run.name={name[1:-1]}."
    if name != name.strip() or not name.isprintable():
        return f"expected printable characters, and no spaces at either end, found {name!r}."
    if (size := len(name.encode())) > LONGEST_NAME:
        return f"expected at most {LONGEST_NAME} bytes, found {size}: {name[:40]!r}…"
    return ""

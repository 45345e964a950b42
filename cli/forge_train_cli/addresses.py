"""Arguments that may be addresses: `s3://bucket/runs/first`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click

from forge_train.base.errors import ConfigError
from forge_train.checkpoint.remote import is_remote, plain
from forge_train.checkpoint.run import address_of, is_checkpoint, is_run
from forge_train.mesh.world import World

LONGEST = 3600.0
"""Seconds that the other processes wait for the first one to fetch a checkpoint."""


def fetch(resume: str, folder: Path) -> str:
    """The target of `--resume`. If it is an address, the first process fetches it and the others wait."""
    if not (address := address_of(resume)):
        return plain(resume)
    from forge_train.checkpoint.fetching import fetched, target_of

    if World.here().rank == 0:
        return fetched(address, folder)
    target = target_of(address, folder)
    deadline = time.monotonic() + LONGEST
    while not (is_run(target) or is_checkpoint(target)):
        if time.monotonic() > deadline:
            raise ConfigError(f"{target}: the first process has not fetched it from {resume} in {LONGEST:g} s.")
        time.sleep(0.5)
    return str(target)


class _Place(click.Path):
    """A path. An address stays a string, and so does the folder of a copied run."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return address_of(str(value)) or Path(plain(str(value)))


class _Fetched(click.Path):
    """A path; a checkpoint at an address is fetched to a temporary folder that lasts until the command ends."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or not is_remote(value) or ctx is None:
            return Path(plain(str(value)))
        from forge_train.checkpoint.fetching import locate

        place = locate(value)
        stored = place.one()
        folder = Path(ctx.with_resource(tempfile.TemporaryDirectory(prefix="forge-")))
        return place.store.fetch(stored, folder / stored.name)


PLACE, FETCHED = _Place(), _Fetched()

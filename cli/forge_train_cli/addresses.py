"""Arguments that may be addresses: `s3://bucket/runs/first`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from forge_train.base.files import plain
from forge_train_kit.stores.addresses import address_of, is_remote


class _Place(click.Path):
    """A path. An address stays a string, and so does the folder of a copied run."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return address_of(str(value)) or Path(plain(str(value)))


class _Fetched(click.Path):
    """A path; a checkpoint at an address is fetched to a temporary folder that lasts until the command ends."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or not is_remote(value) or ctx is None:
            return Path(plain(str(value)))
        from forge_train_kit.stores.fetching import locate

        place = locate(value)
        stored = place.one()
        folder = Path(ctx.with_resource(tempfile.TemporaryDirectory(prefix="forge-")))
        return place.store.fetch(stored, folder / stored.name)


PLACE, FETCHED = _Place(), _Fetched()

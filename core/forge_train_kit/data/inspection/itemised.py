"""Prepared records with items as an inspection sees them: texts, and the items of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from forge_train import ConfigError

from ..documents import Documents
from ..held_out import SIDES
from ..items import ItemFields, Records
from ..items.fields import root_of
from ..manifest import Prepared
from ..shard import Shard


def with_items(prepared: Prepared, shards: Sequence[Shard], facts: dict[str, Any]) -> tuple[Records, Documents]:
    """The records of a folder, and their texts.

    Args:
        prepared: the folder.
        shards: of both sides.
        facts: get the number of items of each modality, and those of records in place of documents.
    """
    sources = list(map(str, prepared.manifest.sources.get("entries", ())))
    fields = ItemFields({}, bool(prepared.manifest.settings.get("alone")), _root(sources))
    records = Records(Documents(shards), fields)
    for side in SIDES:
        of_side = Records(prepared.sides[side], fields)
        facts[side] |= {"documents": of_side.count, "tokens": of_side.tokens}
    facts["items"] = dict(Counter(one.modality for at in range(records.count) for one in records.table(at).items))
    return records, Documents([_texts(one) for one in shards])


def _root(sources: Sequence[str]) -> str:
    """The folder of all data files; empty if they are not there any more."""
    try:
        return root_of(sources, "")
    except ConfigError:
        return ""


def _texts(shard: Shard) -> Shard:
    """The tokens of records, without the tables of their items."""
    lengths = np.diff(shard.ends, prepend=0)
    kept = np.repeat(np.arange(len(lengths)) % 2 == 0, lengths)
    trained = None if shard.trained is None else shard.trained[kept]
    return Shard(shard.path, shard.tokens[kept], np.cumsum(lengths[::2]), trained)

"""Shards of tokens of every kind, opened and laid out in rows."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from forge_train import ConfigError

if TYPE_CHECKING:
    from forge_train_kit.tokenizer import Tokenizer

    from .documents import Documents
    from .held_out import Side
    from .items import Records
    from .rows import Pieces, Rows
    from .shard import Shard


def tokenizer_of(path: Path) -> str:
    """Return the required `tokenizer.path` of a prepared folder; empty for anything else."""
    from .manifest import FILE, TOKENIZER, read_manifest

    if not (path / FILE).is_file():
        return ""
    try:
        known: str = read_manifest(path, key="tokens.path").tokenizer["path"]
    except ConfigError:  # told where the tokens are opened
        return ""
    return known if known != TOKENIZER else str((path / TOKENIZER).absolute())


def tokens_per_byte(path: Path, *, isolate: bool) -> float | None:
    """Predicted tokens for each byte of a prepared folder's held-out text; None where it has none, or parts of its text
    are not learned."""
    from .manifest import FILE, read_manifest

    if not (path / FILE).is_file():
        return None
    manifest = read_manifest(path, key="tokens.path")
    size = manifest.total("bytes", "validation")
    if not size or any(one.header.trained for one in manifest.shards["validation"]):
        return None
    unpredicted = manifest.total("documents", "validation") if isolate else 1
    return (manifest.total("tokens", "validation") - unpredicted) / size


def open_tokens(path: Path, tokenizer: Tokenizer, *, dtype: str, held_out: float, key: str) -> Mapping[Side, Documents]:
    """Both sides of a folder or a file of tokens.

    Args:
        path: a prepared folder, or a file of another program.
        tokenizer: the run's.
        dtype: of a file that does not say it; empty for one that does.
        held_out: share of the documents that is kept for evaluation where the files hold nothing out.
        key: section or list item that has the keys `path` and `dtype`, for messages.

    Raises:
        ConfigError: the files are none of this, damaged, of another tokenizer, or have ids that the tokenizer has not.
    """
    from .documents import Documents
    from .manifest import FILE, WORK, open_prepared

    vocabulary = tokenizer.vocabulary
    if (path / FILE).is_file() or (path / WORK).is_dir():
        if dtype:
            raise ConfigError(f"{key}.dtype: has no effect: the shards of {path} say it themselves.")
        prepared = open_prepared(path, key=f"{key}.path")
        made_with = prepared.manifest.tokenizer
        if made_with["digest"] != tokenizer.digest:
            raise ConfigError(
                f"tokenizer.path: {path} was prepared with another tokenizer. Its own is {prepared.tokenizer}."
            )
        for side in prepared.manifest.shards.values():
            for one in side:
                if one.header.largest >= vocabulary:
                    raise ConfigError(beyond(path / one.file, one.header.largest, None, vocabulary))
        if prepared.sides["validation"].tokens or not held_out:
            return prepared.sides
        return divided(prepared.sides["train"].shards, held_out, prepared.sides["train"].digest, vocabulary)
    if path.is_dir():
        raise ConfigError(
            f"{key}.path: {path} has no manifest, so forge data prepare did not write it. For tokens of another "
            "program name the file."
        )
    from .foreign import largest, open_foreign

    paths = [path]
    if any(sign in str(path) for sign in "*?[") and not path.exists():
        paths = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        if not paths:
            raise ConfigError(f"{key}.path: {str(path)!r}: the pattern matches no file.")
    stated = dtype or None
    shards = [shard for one in paths for shard in open_foreign(one, dtype=stated, end=tokenizer.end, key=f"{key}.")]
    for shard in shards:
        top, at = largest(shard)
        if top >= vocabulary:
            raise ConfigError(beyond(shard.path, top, at, vocabulary))
    if held_out:
        return divided(shards, held_out, vocabulary=vocabulary)
    return {"train": Documents(shards, vocabulary=vocabulary), "validation": Documents([])}


def beyond(path: Path, id: int, at: int | None, vocabulary: int, *, key: str = "tokenizer.path") -> str:
    """Explain that a file holds an id beyond its tokenizer's vocabulary."""
    place = "" if at is None else f" at {at:,}"
    return (
        f"{path}: holds the token id {id:,}{place}, and the tokenizer has {vocabulary:,}: they do not belong together. "
        f"Set {key} to the one that made it."
    )


def divided(
    shards: list[Shard], held_out: float, digest: str = "", vocabulary: int | None = None
) -> Mapping[Side, Documents]:
    """The last documents, of about that share of the tokens, apart from the others. At least one stays on each side
    where there are two.

    Args:
        shards: to divide.
        held_out: share of the tokens.
        digest: identifies the shards; without one their tokens are sampled, a page of memory each.
        vocabulary: ids must be below it, if it is known.
    """
    from .documents import Documents
    from .shard import Shard

    whole = Documents(shards, vocabulary=vocabulary)
    if whole.count < 2:
        return {"train": whole, "validation": Documents([])}
    wanted, last = max(int(whole.tokens * (1 - held_out)), 1), whole.span(whole.count - 1)[0]
    border = int(whole.ends_within(wanted - 1, last)[0]) if wanted <= last else last
    train: list[Shard] = []
    validation: list[Shard] = []
    for shard in whole.shards:
        cut = min(max(border, 0), len(shard.tokens))
        at = int(shard.ends.searchsorted(cut, "right"))
        for side, tokens, ends in (
            (train, slice(0, cut), shard.ends[:at]),
            (validation, slice(cut, None), shard.ends[at:] - cut),
        ):
            mask = None if shard.trained is None else shard.trained[tokens]
            side.append(Shard(shard.path, shard.tokens[tokens], ends, mask, first=tokens.start))
        border -= len(shard.tokens)
    known = {side: digest and f"{digest} {side} {held_out}" for side in ("train", "validation")}
    return {
        "train": Documents(train, known["train"], vocabulary=vocabulary),
        "validation": Documents(validation, known["validation"], vocabulary=vocabulary),
    }


def _check_uncut(documents: Documents, sequence: int, packing: str) -> None:
    """Conversations lose what they were about where they are cut.

    Raises:
        ConfigError: some would be.
    """
    if packing == "split":
        raise ConfigError("packing 'split' would cut conversations: choose best_fit, pad or buckets.")
    lengths = documents.lengths()
    if longer := int((lengths > sequence).sum()):
        raise ConfigError(
            f"{longer:,} of {len(lengths):,} conversations are longer than a row of {sequence:,} tokens, the longest "
            f"has {int(lengths.max()):,}: raise train.sequence, or leave them out of the source."
        )


def rows_of(documents: Documents, sequence: int, *, packing: str, isolate: bool, pad: int) -> Rows:
    """Documents in rows.

    Args:
        documents: of one side.
        sequence: tokens of a row.
        packing: `split`, `best_fit`, `pad` or `buckets`.
        isolate: whether documents of one row are kept apart; `best_fit` and `pad` always do.
        pad: the token id after what a row holds.

    Raises:
        ConfigError: conversations would be cut.
    """
    from .plans import planned
    from .rows import SplitRows

    if documents.masked:
        _check_uncut(documents, sequence, packing)
    if packing == "split":
        return SplitRows(documents, sequence, isolate=isolate)

    def packed() -> Pieces:
        return _pieces(documents, sequence, packing)

    pieces = packed() if packing == "pad" else planned(documents, f"{packing} {sequence}", packed)
    return laid_out(documents, sequence, pieces, packing=packing, pad=pad)


def _pieces(documents: Documents, sequence: int, packing: str) -> Pieces:
    from .packing import arranged, cut
    from .rows import Pieces

    document, start, length = cut(documents.lengths(), sequence)
    packed = arranged(length, sequence, packing)
    order = packed.order
    return Pieces(document[order], start[order], length[order], packed.row_ends)


def laid_out(documents: Documents | Records, sequence: int, pieces: Pieces, *, packing: str, pad: int) -> Rows:
    """Pieces of documents as rows, or as buckets where that is the packing; with their items, if they are records."""
    from .items import ItemRows, Records
    from .rows import Buckets, PackedRows

    if isinstance(documents, Records):
        return ItemRows(documents, sequence, pieces, pad=pad)
    made = Buckets if packing == "buckets" else PackedRows
    return made(documents, sequence, pieces, pad=pad)

"""The token stores that paths and URLs stand for, and whether all of their shards are there."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from raysharded.checkpoint.storage import Storage, open_storage
from raysharded.checkpoint.storage.optional_operations import sizes_of
from raysharded.data.store.layout import HEADER_BYTES, INDEX, Index, Shard, parse_header
from raysharded.data.store.shard_reader import read_index
from raysharded.data.store.store_source import FoundStore
from raysharded.data.text.files import file_system
from raysharded.display.plain_text import masked
from raysharded.errors import DataError, StorageError
from raysharded.locations import THROUGH_FSSPEC, join_url, local_path, scheme_of

_MOST_HEADERS, _THREADS = 64, 8
_OPTIONS = re.compile(r"\?(?=[a-z_]+=)")
"""The beginning of a URL's options; `?` alone is a wildcard."""


def find_stores(paths: Sequence[str]) -> tuple[FoundStore, ...]:
    """The token stores in these folders, in this order; empty if they have none.

    Raises DataError if only some of the paths are stores, and for stores of different tokenizers.
    """
    found = [_find(path) for path in paths]
    stores = tuple(store for store in found if store is not None)
    if not stores:
        return ()
    if len(stores) < len(paths):
        other = next(path for path, store in zip(paths, found, strict=True) if store is None)
        raise DataError(
            f"{masked(other)}: no token store, but {masked(stores[0].url)} is one. Convert it with `raysharded data "
            "convert`, or leave it out."
        )
    first = stores[0].index.kind
    for store in stores[1:]:
        for what, mine, other_one in (
            ("tokenizer", first.tokenizer, store.index.kind.tokenizer),
            ("vocab_size", first.vocab_size, store.index.kind.vocab_size),
            ("page_tokens", first.page_tokens, store.index.kind.page_tokens),
        ):
            if mine != other_one:
                raise DataError(
                    f"{masked(store.url)}: its {what} is {other_one!r}, but that of {masked(stores[0].url)} is "
                    f"{mine!r}. Pack all data with one tokenizer, or leave the odd ones out of the paths."
                )
    return stores


def check_shards(stores: Sequence[FoundStore]) -> None:
    """Raise DataError with the first shard that is missing, or of another size than in its store's index.

    The headers of up to 64 shards of a store, evenly spread, are read, too: a shard of another store is named, with the
    tokenizer that it has.
    """
    for store in stores:
        storage, index = open_storage(store.url), store.index
        try:
            sizes = sizes_of(storage, [shard.name for shard in index.shards])
        except StorageError as error:
            raise StorageError(f"{masked(store.url)}: cannot be listed: {masked(str(error))}") from error
        for shard in index.shards:
            where, expected = masked(join_url(store.url, shard.name)), shard.size_bytes(index.kind)
            if shard.name not in sizes:
                raise DataError(f"{where}: the shard is missing, but {INDEX} names it. Restore it from its source.")
            size = sizes[shard.name]
            if size is None and local_path(store.url) is not None:
                size = storage.size(shard.name)
            if size not in (None, expected):
                raise DataError(
                    f"{where}: the shard has {size} bytes instead of {expected}: it is truncated, or was replaced. "
                    "Copy it again from its source."
                )
        looked_at = index.shards[:: max(1, -(-len(index.shards) // _MOST_HEADERS))]
        with ThreadPoolExecutor(_THREADS, "raysharded-headers") as threads:
            list(threads.map(partial(_check_header, storage, index), looked_at))


def _check_header(storage: Storage, index: Index, shard: Shard) -> None:
    where, data = masked(join_url(storage.url, shard.name)), bytearray(HEADER_BYTES)
    try:
        storage.read_into(shard.name, 0, [memoryview(data)])
    except StorageError as error:
        raise StorageError(f"{where}: cannot be read: {masked(str(error))}") from error
    kind, _, shard_id = parse_header(bytes(data), where)
    if shard_id == shard.id:
        return
    for what, own, expected in (
        ("tokenizer", kind.tokenizer, index.kind.tokenizer),
        ("vocab_size", kind.vocab_size, index.kind.vocab_size),
    ):
        if own != expected:
            raise DataError(
                f"{where}: the shard's {what} is {own!r}, but that of the store is {expected!r}: it is a shard of "
                "another store. Restore it from its source."
            )
    raise DataError(
        f"{where}: the shard was replaced: it has the id {shard_id[:12]}, but {shard.id[:12]} in the index {INDEX}. "
        "Restore it from its source; files must not change while a run uses them."
    )


def _find(path: str) -> FoundStore | None:
    folder = path.removesuffix(f"/{INDEX}")
    local = local_path(folder)
    if local is not None and not os.path.isfile(os.path.join(local, INDEX)):
        return None
    begin = _OPTIONS.split(folder)[0]
    if local is None and (folder.endswith(".parquet") or "*" in begin or "[" in begin):
        return None
    if local is None and scheme_of(folder) != "s3" and not folder.startswith(THROUGH_FSSPEC):
        file_system(folder)  # raises the error for a URL that nothing can open
    index = read_index(open_storage(folder))
    return None if index is None else FoundStore(folder, index)

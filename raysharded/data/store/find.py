"""The token stores that paths and URLs stand for, and whether all of their shards are there."""

from __future__ import annotations

import os
from collections.abc import Sequence

from raysharded.checkpoint.storage import open_storage
from raysharded.checkpoint.storage.optional_operations import list_sizes
from raysharded.data.store.layout import INDEX
from raysharded.data.store.shard_reader import read_index
from raysharded.data.store.store_source import FoundStore
from raysharded.data.text.files import file_system
from raysharded.display.plain_text import masked
from raysharded.errors import DataError, StorageError
from raysharded.locations import THROUGH_FSSPEC, join_url, local_path, scheme_of


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
    """Raise DataError with the first shard that is missing, or of another size than in its store's index."""
    for store in stores:
        storage, index = open_storage(store.url), store.index
        try:
            sizes = list_sizes(storage, "")
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


def _find(path: str) -> FoundStore | None:
    folder = path.removesuffix(f"/{INDEX}")
    local = local_path(folder)
    if folder.endswith(".parquet") or "*" in folder or "[" in folder:
        return None
    if local is not None and not os.path.isfile(os.path.join(local, INDEX)):
        return None
    if local is None and scheme_of(folder) != "s3" and not folder.startswith(THROUGH_FSSPEC):
        file_system(folder)  # raises the error for a URL that nothing can open
    index = read_index(open_storage(folder))
    return None if index is None else FoundStore(folder, index)

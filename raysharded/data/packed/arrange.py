"""Packing ahead: a plan for the documents of a token store."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from raysharded.checkpoint.storage import open_storage
from raysharded.data.packed.arrangement import Int64s, Pieces, groups
from raysharded.data.packed.plan_file import Facts, GroupColumns, Plan, name_of_plan, parse_plan, read_plan
from raysharded.data.store.find import find_stores
from raysharded.data.store.layout import Kind, from_bytes
from raysharded.data.store.store_source import FoundStore, TokenStream
from raysharded.data.text.files import PathLike, as_paths
from raysharded.display.plain_text import masked
from raysharded.errors import ConfigError, DataError
from raysharded.locations import join_url

_CHUNK_TOKENS = 1 << 20
GROUP_PLACES = 1 << 17
"""Places of the samples of a group; fewer only for one sample of more."""
_BYTES = "bytes"
_END_OF_BYTES = 256


def arrange(path: PathLike, *, seq_len: int, end_of_document: int | None = None) -> Facts:
    """Make a plan for packing the documents of the token store at `path` into sequences of `seq_len` tokens.

    It is written beside the store. A plan that is there with these settings is left as it is. Reads all tokens once.
    Memory: some chunks of 2^20 tokens, and 20 bytes for each 131,072 tokens. `end_of_document`: the token that ends
    documents, for stores that do not name it.

    Raises ConfigError for arguments that cannot work, DataError for no store, a damaged one, and one without documents,
    StorageError if the plan cannot be written.
    """
    if not isinstance(seq_len, int) or isinstance(seq_len, bool) or seq_len < 1:
        raise ConfigError(f"arrange: seq_len={seq_len!r}: give a whole number of 1 or more.")
    (folder,) = as_paths(path, "path")
    store = one_store((folder,), "arrange")
    end = end_of_documents(store.index.kind, end_of_document, f"arrange: {masked(folder)}")
    storage, name = open_storage(folder), name_of_plan(seq_len)
    if name in storage.list(""):
        there = parse_plan(storage.read(name), masked(join_url(folder, name)), "this command").facts
        if (there.store, there.end_of_document) == (store.index.digest, end):
            return there
        raise ConfigError(
            f"arrange: {masked(join_url(folder, name))} was made for other tokens, or another end_of_document. Runs "
            "may use it: delete it, if none does."
        )
    stream = TokenStream([store])
    samples = samples_per_block(seq_len)
    found = GroupColumns()
    last_sample = 0
    with ThreadPoolExecutor(stream.num_readers, "raysharded-arrange") as threads:
        pieces = _Documents(stream, end, seq_len, threads)
        for group, where in groups(pieces, seq_len=seq_len, samples=samples):
            found.add(group)
            last_sample = max(where)
    if not found:
        raise DataError(f"{masked(folder)}: no document in it has two tokens. Nothing to arrange.")
    facts = Facts(
        store=store.index.digest,
        seq_len=seq_len,
        end_of_document=end,
        samples_per_block=samples,
        num_groups=len(found),
        num_samples=(len(found) - 1) * samples + last_sample + 1,
        num_documents=pieces.num_documents,
        num_cuts=pieces.num_cuts,
        num_targets=pieces.num_targets,
        num_read=sum(found.lengths),
    )
    storage.write(name, [found.to_bytes(facts)])
    return facts


def samples_per_block(seq_len: int) -> int:
    """Samples per group: the largest power of two with at most `GROUP_PLACES` places, or 1."""
    return 1 << max(0, (GROUP_PLACES // seq_len).bit_length() - 1)


def one_store(paths: tuple[str, ...], what: str) -> FoundStore:
    """The token store at the only path. Raises ConfigError for several, DataError for none."""
    if len(paths) != 1:
        raise ConfigError(f"{what}: a plan is for one token store; mix several with raysharded.Mixture.")
    stores = find_stores(paths)
    if not stores:
        raise DataError(
            f"{masked(paths[0])}: no token store. Make one of text with `raysharded data pack`, or of token files with "
            "`raysharded data convert`."
        )
    return stores[0]


def end_of_documents(kind: Kind, given: int | None, what: str) -> int:
    """The token that ends documents. Raises ConfigError if nothing names it, or if it is outside of the vocabulary."""
    known = _END_OF_BYTES if kind.tokenizer == _BYTES else kind.end_of_document
    end = known if given is None else given
    if end is None:
        raise ConfigError(f"{what} does not name the token that ends documents. Give its number as end_of_document.")
    if not isinstance(end, int) or isinstance(end, bool) or not 0 <= end < kind.vocab_size:
        raise ConfigError(f"{what}: end_of_document={end!r} is no token of its vocabulary of {kind.vocab_size}.")
    return end


class _Documents:
    """The pieces of a stream's documents, read once."""

    def __init__(self, stream: TokenStream, end_of_document: int, seq_len: int, threads: ThreadPoolExecutor) -> None:
        """`threads`: read ahead of the iteration."""
        self._stream, self._end, self._seq_len, self._threads = stream, end_of_document, seq_len, threads
        self.num_documents = self.num_cuts = self.num_targets = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        until = -1
        for pieces in self._parts():
            starts, sizes = pieces.starts, pieces.sizes
            if not len(starts):
                continue
            ends = starts + sizes
            cuts = int((starts[1:] == ends[:-1]).sum()) + int(starts[0] == until)
            until = int(ends[-1])
            self.num_cuts += cuts
            self.num_documents += len(starts) - cuts
            self.num_targets += int(sizes.sum())
            yield from zip(starts.tolist(), sizes.tolist(), strict=True)

    def _parts(self) -> Iterator[Pieces]:
        start, seq_len, total = 0, self._seq_len, self._stream.num_tokens
        for stop, ends in self._ends():
            if ends.size:
                yield Pieces.of(ends, start, int(ends[-1]) + 1, seq_len)
                start = int(ends[-1]) + 1
            whole = max(0, stop - 1 - start) // seq_len  # of a document that is longer than the chunk
            yield Pieces(start + np.arange(whole) * seq_len, np.full(whole, seq_len))
            start += whole * seq_len
        if start < total - 1:
            yield Pieces.of(np.empty(0, dtype=np.int64), start, total, seq_len)

    def _ends(self) -> Iterator[tuple[int, Int64s]]:
        """(end, positions of the tokens that end documents) of each chunk."""
        total, ahead = self._stream.num_tokens, self._stream.num_readers
        firsts = iter(range(0, total, _CHUNK_TOKENS))
        waiting: deque[tuple[int, Future[Int64s]]] = deque()
        while True:
            for first in firsts:
                waiting.append((first, self._threads.submit(self._ends_in, first)))
                if len(waiting) > ahead:
                    break
            if not waiting:
                return
            first, found = waiting.popleft()
            yield min(first + _CHUNK_TOKENS, total), found.result()

    def _ends_in(self, first: int) -> Int64s:
        stop = min(first + _CHUNK_TOKENS, self._stream.num_tokens)
        tokens = from_bytes(self._stream.read(first, stop), self._stream.kind.token_bytes)
        return first + np.flatnonzero(tokens == self._end)


def open_plan(store: FoundStore, seq_len: int) -> Plan:
    """The plan beside a store. Raises DataError as `read_plan`."""
    return read_plan(open_storage(store.url), store.index, seq_len)

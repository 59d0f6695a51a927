"""A dataset of documents packed to the length of a sequence."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from raysharded.data.dataset import TokenDataset, caches_of, require_whole
from raysharded.data.packed.arrange import end_of_documents, one_store, open_plan
from raysharded.data.packed.arrangement import Pieces, placed
from raysharded.data.packed.plan_file import Plan
from raysharded.data.store.find import check_shards, find_stores
from raysharded.data.store.layout import Bytes, Kind, from_bytes
from raysharded.data.store.store_source import READ_AHEAD_BLOCKS, StoreSource
from raysharded.data.text.files import PathLike
from raysharded.display.plain_text import masked
from raysharded.errors import ConfigError, DataError

Packing = Literal["best_fit", "concatenate"]
Int64s: TypeAlias = npt.NDArray[np.int64]
_Uint32s: TypeAlias = npt.NDArray[np.uint32]
Sample: TypeAlias = dict[str, Int64s]

NO_TARGET = -100
"""Label of a place without a target, which torch's cross entropy ignores."""
_ARRANGED_SHARE = 4
"""Arrangements may have this part of the cache's bytes, besides it."""
_OBJECT_BYTES = 512


class PackedDataset:
    """Samples of `seq_len` tokens in which documents do not see each other.

    A sample is a dict of int64 arrays of `seq_len`:

    - `input_ids`: the tokens;
    - `labels`: the next token of the same document, -100 where there is none. They are aligned with `input_ids`;
    - `position_ids`: places within the piece of a document, from 0 on;
    - `document_ids`: the number of the piece in the sample, from 0 on; -1 for padding. A place may attend to
      places of the same number, up to itself.

    With `packing="best_fit"`, every token but the first of a document is a target once. A document is cut only where it
    is longer than a sample, and each sample has whole pieces and then padding. It needs the plan that `raysharded data
    arrange` makes.
    With `packing="concatenate"`, a sample is the next `seq_len` tokens of the stream, as `TokenDataset` has them: no
    padding, but documents are cut at the end of each sample.

    Any thread may read it. Data are opened on first use, and a pickled copy uses the same data or raises DataError.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        seq_len: int,
        packing: Packing = "best_fit",
        end_of_document: int | None = None,
        cache_bytes: int = 512 << 20,
        disk_cache: PathLike | None = None,
        disk_cache_bytes: int = 8 << 30,
    ) -> None:
        """`paths`: the folder or URL of one token store; to concatenate also any that `TokenDataset` takes.

        `cache_bytes`: memory of each process for blocks that were read. With `packing="best_fit"` up to a quarter of
        it is used in addition, for the places of documents in blocks. `end_of_document`: the token that ends documents,
        for data that do not name it. The others are as of `TokenDataset`. Raises ConfigError; reads no file.
        """
        if packing not in get_args(Packing):
            choices = ", ".join(map(repr, get_args(Packing)))
            raise ConfigError(f"PackedDataset.packing={packing!r}: choose one of {choices}.")
        require_whole("PackedDataset", "seq_len", seq_len, 1)
        self._caches = caches_of("PackedDataset", cache_bytes, disk_cache, disk_cache_bytes)
        self._tokens = TokenDataset(
            paths,
            seq_len=seq_len,
            cache_bytes=cache_bytes,
            disk_cache=disk_cache,
            disk_cache_bytes=disk_cache_bytes,
        )
        self.packing, self.seq_len = packing, seq_len
        self._end_of_document = end_of_document
        self._digest: str | None = None
        """Digest of the plan, once it was opened."""
        self._opened: _Concatenated | _BestFit | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        paths = [masked(path) for path in self._tokens.paths]
        return f"PackedDataset({paths!r}, seq_len={self.seq_len}, packing={self.packing!r})"

    @property
    def vocab_size(self) -> int:
        """One more than the largest token that may occur."""
        return self._kind().vocab_size

    @property
    def tokenizer(self) -> str:
        """Id of the tokenizer, as of `TokenDataset`."""
        return self._kind().tokenizer

    def _kind(self) -> Kind:
        opened = self._open()
        return opened.kind

    @property
    def contents_digest(self) -> str:
        """Digest of the plan, which has that of the store; empty for concatenated documents.

        A run keeps it: data with another one are refused.
        """
        self._open()
        return self._digest or ""

    @property
    def stores_digest(self) -> str:
        """As of `TokenDataset`; empty for documents of a plan, which has the digest of the store."""
        return self._tokens.stores_digest if self.packing == "concatenate" else ""

    @property
    def padding(self) -> float:
        """Share of all places that are padding; 0 for concatenated documents."""
        return self._open().padding

    @property
    def samples_per_block(self) -> int:
        """Samples that are cheap to read together, a power of two."""
        return self._open().samples_per_block

    @property
    def num_read_ahead(self) -> int:
        """Number of samples that `read_ahead` is worth; 0: it does nothing."""
        return self._open().num_read_ahead

    def read_ahead(self, ids: Int64s, *, anew: bool = False) -> None:
        """Begin to read these samples, as `TokenDataset.read_ahead` does."""
        self._open().read_ahead(ids, anew=anew)

    def validate(self) -> None:
        """Read and check indexes and the plan now. Raises DataError, as `TokenDataset.validate`."""
        if self.packing == "concatenate":
            self._tokens.validate()
        else:  # documents may be shorter than a sample, and so may all of them together
            check_shards((one_store(self._tokens.paths, "PackedDataset"),))
        with self._lock:
            self._opened = None
        self._open()

    def require_local_files(self) -> None:
        """Raise DataError if a path of this machine has no data; URLs are ignored."""
        self._tokens.require_local_files()

    def __len__(self) -> int:
        return len(self._open())

    def __getitem__(self, index: int, /) -> Sample:
        """Sample `index`. Raises IndexError outside [0, len), DataError for damaged files."""
        opened = self._open()
        if not 0 <= index < len(opened):
            raise IndexError(f"sample {index} of {len(opened)} in {self!r}")
        return opened.sample(int(index))

    def close(self) -> None:
        """End the threads and drop what is in memory. A later read opens the data again. Does not wait."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _open(self) -> _Concatenated | _BestFit:
        with self._lock:
            if self._opened is None:
                self._opened = self._concatenated() if self.packing == "concatenate" else self._best_fit()
            return self._opened

    def _concatenated(self) -> _Concatenated:
        tokens = self._tokens
        if self._end_of_document is None and tokens.tokenizer != "bytes" and len(tokens.paths) > 1:
            named = [store.index.kind.end_of_document for store in find_stores(tokens.paths)]
            ends = sorted({end for end in named if end is not None})
            if len(ends) > 1:
                raise ConfigError(
                    f"{self!r}: documents end with token {' or '.join(map(str, ends))}, by the store. Pack all data "
                    "with one end_of_document, or give the one that holds for all stores."
                )
        kind = Kind(tokenizer=tokens.tokenizer, vocab_size=tokens.vocab_size, end_of_document=tokens.end_of_document)
        return _Concatenated(tokens, kind, end_of_documents(kind, self._end_of_document, repr(self)))

    def _best_fit(self) -> _BestFit:
        store = one_store(self._tokens.paths, "PackedDataset")
        plan = open_plan(store, self.seq_len)
        if self._end_of_document not in (None, plan.facts.end_of_document):
            raise ConfigError(
                f"{self!r}: end_of_document={self._end_of_document}, but the plan was made with "
                f"{plan.facts.end_of_document}."
            )
        if self._digest not in (None, plan.digest):
            raise DataError(
                f"{self!r}: the plan was replaced. Restore it; files must not change while a run uses them."
            )
        self._digest = plan.digest
        source = StoreSource(
            (store,),
            seq_len=self.seq_len,
            samples_per_block=plan.facts.samples_per_block,
            cache_bytes=self._caches.memory_bytes,
            disk=self._caches.disk_for((store,)),
            range_of=plan.range_of,
        )
        return _BestFit(plan, source, self._caches.memory_bytes // _ARRANGED_SHARE)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_opened", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _opened=None, _lock=threading.Lock())


class _Concatenated:
    """Consecutive tokens of a stream."""

    padding = 0.0

    def __init__(self, tokens: TokenDataset, kind: Kind, end_of_document: int) -> None:
        self._tokens, self.kind, self._end = tokens, kind, end_of_document
        self.samples_per_block, self.num_read_ahead = tokens.samples_per_block, tokens.num_read_ahead

    def __len__(self) -> int:
        return len(self._tokens)

    def sample(self, index: int) -> Sample:
        tokens = self._tokens[index]
        inputs, is_end = tokens[:-1], tokens[:-1] == self._end
        begins = np.concatenate([[0], np.flatnonzero(is_end[:-1]) + 1])
        documents = np.concatenate([[0], np.cumsum(is_end[:-1])])
        return {
            "input_ids": inputs.copy(),
            "labels": np.where(is_end, NO_TARGET, tokens[1:]),
            "position_ids": np.arange(len(inputs)) - begins[documents],
            "document_ids": documents,
        }

    def read_ahead(self, ids: Int64s, *, anew: bool) -> None:
        self._tokens.read_ahead(ids, anew=anew)

    def close(self) -> None:
        self._tokens.close()


@dataclass(frozen=True, slots=True)
class _Arranged:
    """Pieces of a group, by the sample that has them."""

    starts: _Uint32s
    """Positions in the group's range."""
    sizes: _Uint32s
    firsts: _Uint32s
    """The first piece of each sample, and the end; [samples + 1]."""

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays, and of what holds them."""
        return self.starts.nbytes + self.sizes.nbytes + self.firsts.nbytes + _OBJECT_BYTES


class _BestFit:
    """Samples of a plan."""

    def __init__(self, plan: Plan, source: StoreSource, arranged_bytes: int) -> None:
        """`arranged_bytes`: memory for arrangements."""
        self._plan, self._source, self._arranged_bytes = plan, source, arranged_bytes
        self.kind = source.stream.kind
        self.facts = plan.facts
        self.padding, self.samples_per_block = self.facts.padding, self.facts.samples_per_block
        self.num_read_ahead = READ_AHEAD_BLOCKS * self.samples_per_block
        self._token_bytes = source.stream.kind.token_bytes
        self._arranged: OrderedDict[int, _Arranged] = OrderedDict()
        self._num_bytes = 0
        """Memory of the arrangements."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.facts.num_samples

    def sample(self, index: int) -> Sample:
        number, within = divmod(index, self.samples_per_block)
        block, seq_len, size = self._source.block(number), self.facts.seq_len, self._token_bytes
        arranged = self._arrangement(number, block)
        first, stop = arranged.firsts[within : within + 2].tolist()
        found = {
            "input_ids": np.full(seq_len, self.facts.end_of_document),
            "labels": np.full(seq_len, NO_TARGET),
            "position_ids": np.zeros(seq_len, dtype=np.int64),
            "document_ids": np.full(seq_len, -1),
        }
        at = 0
        for document, piece in enumerate(range(first, stop)):
            start, length = int(arranged.starts[piece]), int(arranged.sizes[piece])
            tokens = from_bytes(block[start * size : (start + length + 1) * size], size)
            places = slice(at, at + length)
            found["input_ids"][places], found["labels"][places] = tokens[:-1], tokens[1:]
            found["position_ids"][places] = np.arange(length)
            found["document_ids"][places] = document
            at += length
        return found

    def _arrangement(self, number: int, block: Bytes) -> _Arranged:
        with self._lock:
            if (known := self._arranged.get(number)) is not None:
                self._arranged.move_to_end(number)
                return known
        arranged = self._arrange(number, block)
        with self._lock:
            if number not in self._arranged:
                self._arranged[number] = arranged
                self._num_bytes += arranged.num_bytes
            while self._num_bytes > self._arranged_bytes and len(self._arranged) > 1:
                self._num_bytes -= self._arranged.popitem(last=False)[1].num_bytes
        return arranged

    def _arrange(self, number: int, block: Bytes) -> _Arranged:
        group, seq_len, samples = self._plan.group(number), self.facts.seq_len, self.samples_per_block
        ends = np.flatnonzero(from_bytes(block, self._token_bytes) == self.facts.end_of_document)
        pieces = Pieces.of(ends, 0, group.length, seq_len)
        own = np.ones(len(pieces.starts), dtype=np.bool_)
        own[list(group.others)] = False
        starts, sizes = pieces.starts[own], pieces.sizes[own]
        where = placed(sizes.tolist(), group.num_sorted, seq_len, samples)
        if where is None:
            raise DataError(f"group {number} of the plan does not fit its tokens: the plan was made for other data.")
        by_sample = np.argsort(where, kind="stable")
        counts = np.bincount(where, minlength=samples)
        firsts = np.concatenate([[0], np.cumsum(counts)])
        return _Arranged(*(one.astype(np.uint32) for one in (starts[by_sample], sizes[by_sample], firsts)))

    def read_ahead(self, ids: Int64s, *, anew: bool) -> None:
        self._source.expect(ids, anew=anew)

    def close(self) -> None:
        self._source.close()

"""Reads that serve pieces: every chunk that any piece needs is read once, checked against its digest, and handed out.

Bytes go straight to their place if a piece is contiguous in its file and in its destination. All others go through a
buffer of one span.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from blake3 import blake3

from raysharded.checkpoint.byte_ranges import Bytes, Piece, Straight
from raysharded.checkpoint.format.manifest import DIGEST_BYTES, FileRecord
from raysharded.checkpoint.format.paths import key_of
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.checkpoint.storage.small_objects import intact_on_disk
from raysharded.checkpoint.threads import Threads
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint
from raysharded.locations import join_url

T = TypeVar("T")

GAP_SHARE = 0.03
"""Share of the bytes needed from a file that may be read in addition, to save requests."""

_REMEDY = "Resume from another checkpoint, or restore the file from a copy."


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive chunks `first <= chunk < last` of one file, and the pieces that need some of them."""

    file: FileRecord
    first: int
    last: int
    pieces: list[Piece] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.first * self.file.chunk_size_bytes

    @property
    def stop(self) -> int:
        return min(self.last * self.file.chunk_size_bytes, self.file.size_bytes)

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class View:
    """Bytes of a file from `start` on, in the memory that they are read into."""

    start: int
    data: Bytes

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


class DataFiles:
    """The data files of one checkpoint: reads spans and checks them. Thread-safe."""

    def __init__(self, storage: Storage, prefix: str, files: Sequence[FileRecord]) -> None:
        self._storage, self._prefix, self.files = storage, prefix, files
        self._tables: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def key(self, file: FileRecord) -> str:
        return key_of(self._prefix, file.path)

    def where(self, file: FileRecord) -> str:
        """The file's name for messages."""
        return f"file {join_url(self._storage.url, self.key(file))}"

    def size(self, file: FileRecord) -> int:
        """Size of the file in storage, in bytes. Raises NoSuchKey, and CorruptCheckpoint as `intact_on_disk`."""
        with intact_on_disk(self._storage, self.where(file)):
            return self._storage.size(self.key(file))

    def digests(self, file: FileRecord) -> bytes:
        """All chunks' digests, 32 bytes each. Raises CorruptCheckpoint or IncompleteCheckpoint for a damaged table."""
        if not file.digest_table:
            return file.digests
        with self._lock:
            table = self._tables.get(file.path)
        if table is None:
            table = self._read_table(file)
            with self._lock:
                self._tables[file.path] = table
        return table

    def _read_table(self, file: FileRecord) -> bytes:
        where = f"{self.where(file)}.b3 (the digests of its chunks)"
        expected = file.num_chunks * DIGEST_BYTES
        try:
            with intact_on_disk(self._storage, where):
                table = self._storage.read(key_of(self._prefix, file.table_path), 0, expected + 1)
        except NoSuchKey as error:
            raise IncompleteCheckpoint(f"{where} is missing. {_REMEDY}") from error
        actual = blake3(table).hexdigest()
        if len(table) != expected or actual != file.digest_table:
            raise CorruptCheckpoint(
                f"{where}: {len(table)} bytes with digest {actual}, expected {expected} with {file.digest_table}. "
                f"{_REMEDY}"
            )
        return table

    def read(self, span: Span, views: Sequence[View]) -> None:
        """Fill the views, which cover the span.

        Raises IncompleteCheckpoint if the file is missing or too short, and CorruptCheckpoint as `intact_on_disk`.
        """
        try:
            with intact_on_disk(self._storage, self.where(span.file)):
                count = self._storage.read_into(self.key(span.file), span.start, [view.data.data for view in views])
        except NoSuchKey as error:
            raise IncompleteCheckpoint(
                f"{self.where(span.file)} is missing: it was lost, or the checkpoint was deleted while it was being "
                f"read. {_REMEDY}"
            ) from error
        if count != span.size_bytes:
            raise IncompleteCheckpoint(
                f"{self.where(span.file)} is cut off: it ends at byte {span.start + count} and should have "
                f"{span.file.size_bytes}. {_REMEDY}"
            )

    def corruption(self, span: Span, views: Sequence[View]) -> Iterator[CorruptCheckpoint]:
        """One error for every chunk of the span that does not match its digest."""
        digests, size = self.digests(span.file), span.file.chunk_size_bytes
        for chunk, parts in enumerate(_chunks_of(span, views), span.first):
            hasher = blake3()
            for part in parts:
                hasher.update(part)
            expected = digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
            if hasher.digest() != expected:
                yield CorruptCheckpoint(
                    f"{self.where(span.file)}: chunk {chunk} (from byte {chunk * size} on) has digest "
                    f"{hasher.hexdigest()}, expected {expected.hex()}. {_REMEDY}"
                )

    def fetch(self, pieces: Iterable[Piece]) -> int:
        """Fill all pieces; return the bytes read. Raises the first error; the filled contents are then undefined."""
        traits = self._storage.traits
        spans = plan_spans(self.files, pieces, traits.span_bytes)
        tables = {id(span.file): span.file for span in spans if span.file.digest_table}
        _in_threads(self.digests, list(tables.values()), traits.num_readers)
        _in_threads(self._serve, spans, traits.num_readers)
        return sum(span.size_bytes for span in spans) + sum(f.num_chunks * DIGEST_BYTES for f in tables.values())

    def _serve(self, span: Span) -> None:
        views, others = lay_views(span)
        self.read(span, views)
        for error in self.corruption(span, views):
            raise error
        starts = [view.start for view in views]
        for piece in others:
            for part in _between(views, starts, max(piece.start, span.start), min(piece.stop, span.stop)):
                piece.put(part.start, part.data)

    def find_damage(self, progress: Callable[[int], None] = lambda _: None) -> list[CheckpointError]:
        """Read everything; one error per missing, wrongly sized or changed part. Calls `progress(bytes read)`."""
        damage: list[CheckpointError] = []
        for file in self.files:
            try:
                size = self.size(file)
                if size != file.size_bytes:
                    raise IncompleteCheckpoint(f"{self.where(file)} has {size} bytes instead of {file.size_bytes}.")
                for span in whole_file(file, self._storage.traits.span_bytes):
                    views = [View(span.start, np.empty(span.size_bytes, np.uint8))]
                    self.read(span, views)
                    damage += self.corruption(span, views)
                    progress(span.size_bytes)
            except NoSuchKey:
                damage.append(IncompleteCheckpoint(f"{self.where(file)} is missing."))
            except CheckpointError as error:  # the digest table is damaged, or the file was deleted during the read
                damage.append(error)
        return damage


def plan_spans(files: Sequence[FileRecord], pieces: Iterable[Piece], span_bytes: int) -> list[Span]:
    """The reads that serve all pieces, ordered by file and position. Pure.

    Laws: every chunk that a piece touches is in exactly one span; other chunks are at most GAP_SHARE of these.
    """
    by_file: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault(piece.file, []).append(piece)
    spans: list[Span] = []
    for number in sorted(by_file):
        file = files[number]
        ordered = sorted(by_file[number], key=lambda piece: piece.start)
        runs = _without_small_gaps(_chunk_runs(file, ordered), file.chunk_size_bytes, span_bytes // 16)
        own = [Span(file, *cut) for first, last in runs for cut in _cut(file, first, last, span_bytes)]
        starts = [span.start for span in own]
        for piece in ordered:
            at = bisect_right(starts, piece.start) - 1
            while at < len(own) and own[at].start < piece.stop:
                own[at].pieces.append(piece)
                at += 1
        spans += own
    return spans


def whole_file(file: FileRecord, span_bytes: int) -> list[Span]:
    """Spans that cover a file."""
    return [Span(file, first, last) for first, last in _cut(file, 0, file.num_chunks, span_bytes)]


def lay_views(span: Span) -> tuple[list[View], list[Piece]]:
    """(views for the span's bytes, in order and without gaps; the pieces that must be filled from these views).

    A straight piece receives its bytes directly, unless an earlier straight piece receives some of them.
    """
    views: list[View] = []
    others: list[Piece] = []
    at = span.start
    for piece in span.pieces:  # sorted by start
        start, stop = max(piece.start, span.start), min(piece.stop, span.stop)
        if isinstance(piece.sink, Straight) and start >= at:
            if start > at:
                views.append(View(at, np.empty(start - at, np.uint8)))
            views.append(View(start, piece.sink.out[start - piece.start : stop - piece.start]))
            at = stop
        else:
            others.append(piece)
    if at < span.stop:
        views.append(View(at, np.empty(span.stop - at, np.uint8)))
    return views, others


def _chunks_of(span: Span, views: Sequence[View]) -> Iterator[list[memoryview]]:
    """The bytes of each chunk of the span, as slices of the views that cover it."""
    rest = iter(views)
    data, at = memoryview(b""), 0
    for chunk in range(span.first, span.last):
        missing = min((chunk + 1) * span.file.chunk_size_bytes, span.stop) - chunk * span.file.chunk_size_bytes
        parts: list[memoryview] = []
        while missing:
            if at == len(data):
                data, at = next(rest).data.data, 0
            parts.append(data[at : at + missing])
            at, missing = at + len(parts[-1]), missing - len(parts[-1])
        yield parts


def _between(views: Sequence[View], starts: Sequence[int], start: int, stop: int) -> Iterator[View]:
    """The parts of consecutive views that make up bytes start..stop of the file."""
    at = bisect_right(starts, start) - 1
    while at < len(views) and views[at].start < stop:
        view = views[at]
        first = max(start, view.start)
        yield View(first, view.data[first - view.start : min(stop, view.stop) - view.start])
        at += 1


def _chunk_runs(file: FileRecord, ordered: Sequence[Piece]) -> list[tuple[int, int]]:
    """Runs of consecutive chunks that the pieces (sorted by start) touch."""
    runs: list[list[int]] = []
    for piece in ordered:
        first = piece.start // file.chunk_size_bytes
        last = -(-piece.stop // file.chunk_size_bytes)
        if runs and first <= runs[-1][1]:
            runs[-1][1] = max(runs[-1][1], last)
        else:
            runs.append([first, last])
    return [(first, last) for first, last in runs]


def _without_small_gaps(runs: Sequence[tuple[int, int]], chunk_bytes: int, gap_bytes: int) -> list[tuple[int, int]]:
    """Neighbouring runs joined over gaps of at most `gap_bytes`, the smallest first, while GAP_SHARE allows it."""
    room = int(GAP_SHARE * sum(last - first for first, last in runs))
    gaps = sorted((runs[at + 1][0] - runs[at][1], at) for at in range(len(runs) - 1))
    closed: set[int] = set()
    for gap, at in gaps:
        if gap > room or gap * chunk_bytes > gap_bytes:
            break
        room -= gap
        closed.add(at)
    joined: list[tuple[int, int]] = []
    for at, (first, last) in enumerate(runs):
        joined.append((joined.pop()[0], last) if at - 1 in closed else (first, last))
    return joined


def _cut(file: FileRecord, first: int, last: int, span_bytes: int) -> list[tuple[int, int]]:
    step = max(1, span_bytes // file.chunk_size_bytes)
    return [(at, min(at + step, last)) for at in range(first, last, step)]


def _in_threads(serve: Callable[[T], object], items: Sequence[T], num_threads: int) -> None:
    if len(items) <= 1 or num_threads <= 1:
        for item in items:
            serve(item)
        return
    pool = Threads(num_threads, thread_name_prefix="raysharded-read")
    try:
        for _ in pool.map(serve, items):
            pass
    finally:
        pool.shutdown(cancel_futures=True)

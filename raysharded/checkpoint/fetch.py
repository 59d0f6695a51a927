"""Fetching pieces: every chunk that any of them needs is read once, checked against its digest, and handed out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from raysharded.checkpoint.encoding import digest
from raysharded.checkpoint.manifest import FileRecord
from raysharded.checkpoint.pieces import Piece
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint

SPAN_BYTES = 32 << 20
"""At most this many bytes (or one chunk) are asked for in one read."""
NUM_THREADS = 4
"""Reads in flight at once; storage's delay, not this machine's cores, is what they hide."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive chunks of one file, first <= chunk < last, and the pieces that need some of them."""

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


def plan_spans(files: Sequence[FileRecord], pieces: Iterable[Piece]) -> list[Span]:
    """The reads that serve all pieces, in order of file and place. Pure.

    Law: every chunk that a piece touches is in exactly one span, and no other chunk is in any.
    """
    by_file: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault(piece.file, []).append(piece)
    spans: list[Span] = []
    for number in sorted(by_file):
        file = files[number]
        ordered = sorted(by_file[number], key=lambda piece: piece.start)
        own = [Span(file, first, last) for first, last in _chunk_runs(file, ordered)]
        starts = [span.start for span in own]
        for piece in ordered:
            at = bisect_right(starts, piece.start) - 1
            while at < len(own) and own[at].start < piece.stop:
                own[at].pieces.append(piece)
                at += 1
        spans += own
    return spans


def whole_file(file: FileRecord) -> list[Span]:
    """Spans that cover a file."""
    return [Span(file, first, last) for first, last in _cut(file, 0, len(file.digests))]


def read_span(storage: Storage, prefix: str, span: Span) -> bytes:
    """The span's bytes, not yet checked. Raises IncompleteCheckpoint if the file is missing or too short."""
    key = f"{prefix}/{span.file.path}"
    size = span.stop - span.start
    try:
        data = storage.read(key, span.start, size)
    except NoSuchKey as error:
        raise IncompleteCheckpoint(
            f"file {storage.url}/{key} is missing. Resume from another checkpoint, or put the file back."
        ) from error
    if len(data) != size:
        raise IncompleteCheckpoint(
            f"file {storage.url}/{key} is cut off: it ends at byte {span.start + len(data)} and should have "
            f"{span.file.size_bytes}. Resume from another checkpoint, or restore the file from a copy."
        )
    return data


def find_corruption(storage: Storage, prefix: str, span: Span, data: bytes) -> list[CorruptCheckpoint]:
    """One error for every chunk of the span that does not match its digest."""
    found = []
    view, size = memoryview(data), span.file.chunk_size_bytes
    for chunk in range(span.first, span.last):
        at = (chunk - span.first) * size
        actual = digest(view[at : at + size])
        if actual != span.file.digests[chunk]:
            found.append(
                CorruptCheckpoint(
                    f"file {storage.url}/{prefix}/{span.file.path}: chunk {chunk} (from byte {chunk * size} on) has "
                    f"digest {actual}, expected {span.file.digests[chunk]}. Resume from another checkpoint, or "
                    "restore the file from a copy."
                )
            )
    return found


def fetch(storage: Storage, prefix: str, files: Sequence[FileRecord], pieces: Iterable[Piece]) -> None:
    """Fills all pieces. Raises the first error; then what has been filled is undefined. Thread-safe."""

    def serve(span: Span) -> None:
        data = read_span(storage, prefix, span)
        for error in find_corruption(storage, prefix, span, data):
            raise error
        view = np.frombuffer(data, np.uint8)
        for piece in span.pieces:
            start, stop = max(piece.start, span.start), min(piece.stop, span.stop)
            piece.put(start, view[start - span.start : stop - span.start])

    _in_threads(serve, plan_spans(files, pieces))


def find_damage(storage: Storage, prefix: str, files: Sequence[FileRecord]) -> list[CheckpointError]:
    """One error for every missing, wrongly sized or changed part of the files, reading all of them."""
    damage: list[CheckpointError] = []
    for file in files:
        key = f"{prefix}/{file.path}"
        try:
            size = storage.size(key)
        except NoSuchKey:
            damage.append(IncompleteCheckpoint(f"file {storage.url}/{key} is missing."))
            continue
        if size != file.size_bytes:
            damage.append(
                IncompleteCheckpoint(f"file {storage.url}/{key} has {size} bytes instead of {file.size_bytes}.")
            )
            continue
        for span in whole_file(file):
            damage += find_corruption(storage, prefix, span, read_span(storage, prefix, span))
    return damage


def _chunk_runs(file: FileRecord, ordered: Sequence[Piece]) -> list[tuple[int, int]]:
    """Runs of chunks that the pieces (sorted by start) touch, cut to at most SPAN_BYTES."""
    runs: list[list[int]] = []
    for piece in ordered:
        first = piece.start // file.chunk_size_bytes
        last = -(-piece.stop // file.chunk_size_bytes)
        if runs and first <= runs[-1][1]:
            runs[-1][1] = max(runs[-1][1], last)
        else:
            runs.append([first, last])
    return [cut for first, last in runs for cut in _cut(file, first, last)]


def _cut(file: FileRecord, first: int, last: int) -> list[tuple[int, int]]:
    step = max(1, SPAN_BYTES // file.chunk_size_bytes)
    return [(at, min(at + step, last)) for at in range(first, last, step)]


def _in_threads(serve: Callable[[Span], None], spans: Sequence[Span]) -> None:
    if len(spans) == 1:
        serve(spans[0])
        return
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="raysharded-read")
    try:
        for _ in pool.map(serve, spans):
            pass
    finally:
        pool.shutdown(cancel_futures=True)

"""The bytes that are read for some pieces: each needed chunk once, and few others; every byte to its place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from raysharded.checkpoint.byte_ranges import BoxIndex, Piece, Straight
from raysharded.checkpoint.chunk_reader import GAP_SHARE, lay_views, plan_spans, whole_file
from raysharded.checkpoint.format.boxes import BoxTable, FileBox
from raysharded.checkpoint.format.manifest import DIGEST_BYTES, FileRecord, Manifest, TensorInfo
from raysharded.checkpoint.format.shardfile import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, chunk_digests, chunk_size_for
from tests.cases import examples


def _file(number: int, size: int, chunk: int) -> FileRecord:
    digests = bytes(DIGEST_BYTES * -(-size // chunk))
    return FileRecord(
        path=f"f{number}", size_bytes=size, chunk_size_bytes=chunk, digests=digests, boxes=BoxTable.of([])
    )


@st.composite
def _wanted(draw: st.DrawFn) -> tuple[list[FileRecord], list[Piece]]:
    files = [
        _file(number, draw(st.integers(1, 3000)), draw(st.integers(1, 200)))
        for number in range(draw(st.integers(1, 3)))
    ]
    pieces: list[Piece] = []
    for _ in range(draw(st.integers(0, 25))):
        number = draw(st.integers(0, len(files) - 1))
        start = draw(st.integers(0, files[number].size_bytes - 1))
        stop = draw(st.integers(start + 1, min(files[number].size_bytes, start + 500)))
        pieces.append(Piece(number, start, stop, Straight(np.zeros(stop - start, np.uint8))))
    return files, pieces


@settings(max_examples=examples(60, of=200))
@given(_wanted(), st.integers(1, 4000))
def test_every_chunk_that_is_needed_is_in_one_span_and_few_others_are_read(
    wanted: tuple[list[FileRecord], list[Piece]], span_bytes: int
) -> None:
    files, pieces = wanted
    spans = plan_spans(files, pieces, span_bytes)
    read = [(span.file.path, chunk) for span in spans for chunk in range(span.first, span.last)]
    needed = {
        (files[piece.file].path, chunk)
        for piece in pieces
        for chunk in range(
            piece.start // files[piece.file].chunk_size_bytes,
            -(-piece.stop // files[piece.file].chunk_size_bytes),
        )
    }
    assert len(read) == len(set(read))
    assert needed <= set(read)
    for file in files:
        own = [chunk for path, chunk in read if path == file.path]
        assert len(own) - len(needed & {(file.path, chunk) for chunk in own}) <= GAP_SHARE * len(own)
        assert own == sorted(own)
    for span in spans:
        assert span.first < span.last
        assert span.size_bytes <= max(span_bytes, span.file.chunk_size_bytes)
        touching = [p for p in pieces if files[p.file] is span.file and p.start < span.stop and p.stop > span.start]
        assert {id(piece) for piece in span.pieces} == {id(piece) for piece in touching}


@settings(max_examples=examples(60, of=200))
@given(_wanted(), st.integers(1, 4000))
def test_the_views_of_a_span_cover_it_once_and_every_piece_gets_its_bytes(
    wanted: tuple[list[FileRecord], list[Piece]], span_bytes: int
) -> None:
    files, pieces = wanted
    contents = {file.path: np.random.default_rng(7).integers(0, 256, file.size_bytes, np.uint8) for file in files}
    for span in plan_spans(files, pieces, span_bytes):
        views, others = lay_views(span)
        at = span.start
        for view in views:
            assert view.start == at
            view.data[:] = contents[span.file.path][view.start : view.stop]
            at = view.stop
        assert at == span.stop
        for piece in others:
            start, stop = max(piece.start, span.start), min(piece.stop, span.stop)
            piece.put(start, contents[span.file.path][start:stop])
    for piece in pieces:
        assert isinstance(piece.sink, Straight)
        assert np.array_equal(piece.sink.out, contents[files[piece.file].path][piece.start : piece.stop])


def test_a_piece_that_is_alone_in_its_bytes_takes_them_without_a_copy() -> None:
    file = _file(0, 100, 10)
    one, other = np.zeros(25, np.uint8), np.zeros(30, np.uint8)
    pieces = [Piece(0, 10, 35, Straight(one)), Piece(0, 40, 70, Straight(other))]
    [span] = plan_spans([file], pieces, 1000)
    views, others = lay_views(span)
    assert others == []
    assert [np.shares_memory(view.data, buffer) for view, buffer in ((views[0], one), (views[2], other))] == [True] * 2


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 1000))
def test_the_spans_of_a_whole_file_cover_it(size: int, chunk: int, span_bytes: int) -> None:
    spans = whole_file(_file(0, size, chunk), span_bytes)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == size


@given(st.lists(st.integers(1, 1 << 34), max_size=30))
def test_a_chunk_is_a_power_of_two_between_its_bounds_and_small_beside_a_typical_box(boxes: list[int]) -> None:
    size = chunk_size_for(boxes)
    assert MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES
    assert size & (size - 1) == 0
    assert size == MIN_CHUNK_BYTES or size * 32 <= max(boxes)


@pytest.mark.parametrize(
    ("boxes", "size"),
    [([], 64 << 10), ([100], 64 << 10), ([4 << 20] * 9, 128 << 10), ([1 << 30, 10], 4 << 20), ([64 << 20], 2 << 20)],
)
def test_chunk_sizes_of_some_files(boxes: list[int], size: int) -> None:
    assert chunk_size_for(boxes) == size


@given(st.lists(st.binary(max_size=50), max_size=6), st.integers(1, 60))
def test_digests_do_not_depend_on_how_the_bytes_are_cut_into_parts(parts: list[bytes], chunk: int) -> None:
    whole = b"".join(parts)
    expected = chunk_digests([memoryview(whole)], chunk)
    assert chunk_digests([memoryview(part) for part in parts], chunk) == expected
    assert len(expected) == DIGEST_BYTES * -(-len(whole) // chunk)


def test_of_many_boxes_side_by_side_only_those_that_are_wanted_are_inspected(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = [FileBox(name="w", offsets=(0, at), sizes=(4, 1), start=4 * at) for at in range(2000)]
    file = replace(_file(0, 8000, 100), boxes=BoxTable.of(boxes))
    tensors = {"w": TensorInfo(dtype="uint8", shape=(4, 2000))}
    manifest = Manifest(
        run="r", step=1, generation=1, save_id="a", writer="w", created_at=0.0, tensors=tensors, files=(file,)
    )
    index, looked_at = BoxIndex(manifest), list[int]()
    get = BoxTable.__getitem__

    def looking(table: BoxTable, row: int) -> FileBox:
        looked_at.append(row)
        return get(table, row)

    monkeypatch.setattr(BoxTable, "__getitem__", looking)
    found = list(index.pieces("w", (1, 700), (2, 3), np.zeros(6, np.uint8)))
    assert sorted(piece.start for piece in found) == [2801, 2805, 2809]
    assert looked_at == [700, 701, 702]

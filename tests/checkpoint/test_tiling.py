"""Boxes are found to tile a tensor exactly when every cell is in one of them, quickly, however they are cut."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings, strategies as st

from raysharded.checkpoint.format.boxes import BoxTable, FileBox, joined
from raysharded.checkpoint.format.tiling import MAX_IRREGULAR_BOXES, Extent, TooIrregular, first_fault, is_within
from tests.cases import examples, tried_each_time

Shape = tuple[int, ...]


def _table(tensors: list[tuple[Shape, list[Extent]]]) -> BoxTable:
    names = tuple(f"t{number:03d}" for number in range(len(tensors)))
    rows = [
        FileBox(name=name, offsets=offsets, sizes=sizes, start=0)
        for name, (_, extents) in zip(names, tensors, strict=True)
        for offsets, sizes in extents
    ]
    return BoxTable.of(rows).in_terms_of(names, {name: at for at, name in enumerate(names)}, 0)


def _times(shape: Shape, extents: list[Extent]) -> dict[tuple[int, ...], int]:
    """The number of boxes of each cell."""
    count = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for offsets, sizes in extents:
        for cell in itertools.product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True))):
            count[cell] += 1
    return count


def _cut(boxes: list[Extent], which: int, dim: int, cut: int) -> None:
    offsets, sizes = boxes.pop(which)
    for at, size in ((0, cut), (cut, sizes[dim] - cut)):
        if size:
            moved = tuple(o + at * (d == dim) for d, o in enumerate(offsets))
            boxes.append((moved, tuple(size if d == dim else s for d, s in enumerate(sizes))))


@st.composite
def _tensors(draw: st.DrawFn) -> tuple[Shape, list[Extent]]:
    """A tensor cut in rows, in a grid, or by random planes; at times with one box left out, doubled or moved."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    if 0 in shape:
        return shape, []
    boxes: list[Extent] = [((0,) * len(shape), shape)]
    way = draw(st.sampled_from(["rows", "grid", "planes"])) if shape else "whole"
    if way == "planes":
        for _ in range(draw(st.integers(0, 6))):
            which, dim = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
            _cut(boxes, which, dim, draw(st.integers(0, boxes[which][1][dim])))
    elif way != "whole":
        cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
        cuts = cuts if way == "grid" else [cuts[0], *([0, n] for n in shape[1:])]
        corners = itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts))
        boxes = [(tuple(a for a, _ in c), tuple(b - a for a, b in c)) for c in corners]
    spoil = draw(st.sampled_from(["no", "no", "drop", "double", "replace"]))
    which = draw(st.integers(0, len(boxes) - 1))
    if spoil == "drop":
        boxes.pop(which)
    elif spoil == "double":
        boxes.append(boxes[which])
    elif spoil == "replace":
        offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
        boxes[which] = (offsets, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)))
    return shape, draw(st.permutations(boxes))


@settings(max_examples=examples(90, of=300))
@given(st.lists(_tensors(), min_size=1, max_size=4))
def test_the_first_tensor_that_is_not_tiled_is_found_with_a_cell_that_shows_it(
    tensors: list[tuple[Shape, list[Extent]]],
) -> None:
    assert all(is_within(shape, extent) for shape, extents in tensors for extent in extents)
    times = [_times(shape, extents) for shape, extents in tensors]
    wrong = [number for number, count in enumerate(times) if any(n != 1 for n in count.values())]
    found = first_fault(_table(tensors), [shape for shape, _ in tensors])
    if not wrong:
        assert found is None
        return
    assert found is not None
    number, (kind, cell) = found
    count = times[number]
    assert number == wrong[0]
    assert count[cell] > 1 if kind == "twice" else count[cell] == 0
    if kind == "missing":
        assert cell == min(at for at, n in count.items() if n == 0)


@pytest.mark.parametrize(
    ("shape", "extents", "fault"),
    [
        ((), [], ("missing", ())),
        ((), [((), ())], None),
        ((), [((), ()), ((), ())], ("twice", ())),
        ((0, 3), [], None),
        ((3, 0), [], None),
        ((1, 1, 1), [((0, 0, 0), (1, 1, 1))], None),
        ((5,), [((0,), (2,)), ((3,), (2,))], ("missing", (2,))),
        ((5,), [((0,), (3,)), ((2,), (3,))], ("twice", (2,))),
        ((2**40, 2**20), [((0, 0), (2**39, 2**20)), ((2**39, 0), (2**39, 2**20 - 1))], ("missing", (2**39, 2**20 - 1))),
    ],
)
def test_faults_at_the_edges(shape: Shape, extents: list[Extent], fault: object) -> None:
    found = first_fault(_table([(shape, extents)]), [shape])
    assert (found and found[1]) == fault


def _grid(rows: int, columns: int) -> list[Extent]:
    return [((r, c), (1, 1)) for r in range(rows) for c in range(columns)]


def test_a_box_missing_from_a_large_grid_or_there_twice_is_named() -> None:
    shape, boxes = (100, 100), _grid(100, 100)
    missing = first_fault(_table([(shape, boxes[:4321] + boxes[4322:])]), [shape])
    assert missing == (0, ("missing", (43, 21)))
    assert first_fault(_table([(shape, [*boxes, boxes[4321]])]), [shape]) == (0, ("twice", (43, 21)))
    assert first_fault(_table([(shape, [*boxes[:-1], boxes[4321]])]), [shape]) == (0, ("twice", (43, 21)))


def _bricks(count: int) -> tuple[Shape, list[Extent]]:
    """A wall: every other row shifted by half a brick. On no grid."""
    rows: list[Extent] = []
    for row in range(0, count, 2):
        rows += [((row, 0), (1, 4)), ((row, 4), (1, 4)), ((row + 1, 0), (1, 2)), ((row + 1, 2), (1, 6))]
    return (count, 8), rows


def test_boxes_on_no_grid_are_taken_in_small_numbers_only() -> None:
    shape, boxes = _bricks(MAX_IRREGULAR_BOXES // 2)
    assert len(boxes) == MAX_IRREGULAR_BOXES
    assert first_fault(_table([(shape, boxes)]), [shape]) is None
    shape, boxes = _bricks(MAX_IRREGULAR_BOXES // 2 + 2)
    with pytest.raises(TooIrregular, match="516 boxes of 1 tensors"):
        first_fault(_table([(shape, boxes)]), [shape])
    shape, boxes = _bricks(200)
    with pytest.raises(TooIrregular, match="boxes of 60 tensors"):
        first_fault(_table([(shape, boxes)] * 60), [shape] * 60)


def _crossed(dims: int, cuts: int) -> tuple[Shape, list[Extent]]:
    """`dims` layers; layer i is cut in dimension i alone: on no grid, and each box crosses the cuts of the others."""
    shape = (*[cuts] * dims, dims)
    boxes: list[Extent] = []
    for layer in range(dims):
        for cut in range(cuts):
            offsets = tuple(cut if dim == layer else 0 for dim in range(dims))
            boxes.append(((*offsets, layer), (*(1 if dim == layer else cuts for dim in range(dims)), 1)))
    return shape, boxes


@pytest.mark.parametrize(
    ("dims", "cuts", "tensors"),
    tried_each_time(
        [(2, 256, 30), (2, 2, 10_000)],
        of=[(2, 256, 30), (4, 128, 30), (16, 14, 100), (25, 4, 300), (2, 2, 10_000), (2, 2, 100_000)],
    ),
)
def test_no_way_of_cutting_takes_long(dims: int, cuts: int, tensors: int) -> None:
    shape, boxes = _crossed(dims, cuts)
    one = _table([(shape, boxes)])
    width, names = len(shape), tuple(map(str, range(tensors)))
    rows = [one.in_terms_of(names, {"t000": number}, width) for number in range(tensors)]
    table = joined(rows, names, width)[1]
    began = time.process_time()
    assert first_fault(table, [shape] * tensors) is None
    assert time.process_time() - began < 10  # 1 s at most on an idle core

"""Groups of boxes to read together because their bytes are interleaved in the files. Pure.

Bytes are read in whole chunks, for their digests. Ranks of tensor parallelism that hold different columns of the same
rows would each read the whole rows where these were stored whole. Instead one rank reads the rows and sends the other
ranks their columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from raysharded.checkpoint.format.manifest import Manifest
from raysharded.checkpoint.read_plan.dedup import Box, Share, meet

LONG_RUN_BYTES = 1 << 20
"""Length of contiguous runs from which on reading a box reads little else along with it."""


def unions_of(shares: Sequence[Sequence[Share]], manifest: Manifest) -> dict[tuple[str, Box], Box]:
    """Map from (tensor, box) to the union to read it with, where that is better than reading it alone."""
    tensors = {share.name: share for own in shares for share in own}
    wanted = {(share.name, box) for own in shares for share in own for box in share.boxes if len(share.shape) > 1}
    rows: dict[tuple[str, int, int], list[Box]] = defaultdict(list)
    for name, box in sorted(wanted):
        rows[name, box[0][0], box[1][0]].append(box)
    groups = [(name, boxes) for (name, _, _), boxes in rows.items() if len(boxes) > 1]
    stored = _columns(manifest, {name for name, _ in groups})
    found: dict[tuple[str, Box], Box] = {}
    for name, boxes in groups:
        share = tensors[name]
        if any(_run_bytes(box, share) < LONG_RUN_BYTES and _is_cut(box, stored[name]) for box in boxes):
            union = _union(boxes)
            found |= {(name, box): union for box in boxes}
    return found


def _columns(manifest: Manifest, names: set[str]) -> dict[str, list[Box]]:
    """For each tensor, the distinct places of its stored boxes in the dimensions after the first."""
    _, boxes = manifest.boxes()
    number = {name: at for at, name in enumerate(manifest.tensors)}
    found: dict[str, list[Box]] = {}
    for name in names:
        width = len(manifest.tensors[name].shape)
        own = boxes.rows(boxes.tensor == number[name])
        extents = np.unique(np.concatenate([own.offsets[:, 1:width], own.sizes[:, 1:width]], axis=1), axis=0)
        found[name] = [(tuple(row[: width - 1]), tuple(row[width - 1 :])) for row in extents.tolist()]
    return found


def _is_cut(box: Box, stored: Iterable[Box]) -> bool:
    """Whether a stored box holds columns of this box and others besides."""
    own = (box[0][1:], box[1][1:])
    return any(meet(own, other) not in (None, other) for other in stored)


def _run_bytes(box: Box, share: Share) -> int:
    """Number of contiguous bytes of the box in a row-major tensor."""
    run = share.item_bytes
    for size, length in zip(reversed(box[1]), reversed(share.shape), strict=True):
        run *= size
        if size != length:
            break
    return run


def _union(boxes: Sequence[Box]) -> Box:
    """The smallest box around all boxes."""
    first = tuple(min(offsets) for offsets in zip(*(box[0] for box in boxes), strict=True))
    stops = [tuple(o + n for o, n in zip(*box, strict=True)) for box in boxes]
    return first, tuple(max(ends) - at for ends, at in zip(zip(*stops, strict=True), first, strict=True))

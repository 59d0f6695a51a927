"""Bytes of a data file: a safetensors header made here, then the tensors' own buffers, never copied. Pure.

The safetensors library can only write to a local path or make one bytes object, which would hold the shard twice. The
format's header is small enough to write here (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from raysharded.checkpoint.format.boxes import BoxTable, FileBox
from raysharded.checkpoint.format.manifest import SAFETENSORS_DTYPES
from raysharded.checkpoint.format.tiling import is_within
from raysharded.errors import CheckpointError

MIN_CHUNK_BYTES = 64 << 10
MAX_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTensor:
    """One worker's part of one tensor, as raw bytes in C order."""

    name: str
    """Name of the tensor."""
    dtype: str
    """Element type, torch's name without `torch.`: "float32", "bfloat16", "int64", ..."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """First index of the piece in every dimension of the tensor."""
    sizes: tuple[int, ...]
    """Lengths of the piece."""
    data: memoryview | NDArray[np.uint8]
    """Exactly the piece's bytes, contiguous."""


def key_in_file(name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The tensor's key in its safetensors file: its name if it is whole, else `name@o0,o1,...` with its offsets.

    A whole tensor with an ambiguous name (it contains '@', or is `__metadata__`) is written with offsets too.
    Law: a key without '@' is a name; otherwise the text before the last '@' is.
    """
    whole = tuple(sizes) == tuple(shape)
    if whole and "@" not in name and name != "__metadata__":
        return name
    return f"{name}@{','.join(map(str, offsets))}"


def lay_out(tensors: Sequence[ShardTensor], info: Mapping[str, str]) -> tuple[list[memoryview], BoxTable]:
    """(the parts of the file in order, the positions of the tensors' bytes). Empty pieces are left out.

    Wide element types come first, so that every tensor is aligned to its element size. `info` becomes
    `__metadata__`. Raises CheckpointError for an inconsistent or repeated piece.
    """
    pieces = [(tensor, _bytes_of(tensor)) for tensor in tensors if 0 not in tensor.sizes]
    pieces.sort(key=lambda piece: -SAFETENSORS_DTYPES[piece[0].dtype][1])
    entries: dict[str, object] = {"__metadata__": dict(info)}
    begins: list[int] = []
    at = 0
    for tensor, view in pieces:
        key = key_in_file(tensor.name, tensor.shape, tensor.offsets, tensor.sizes)
        if key in entries:
            raise CheckpointError(f"tensor {tensor.name!r} at {tensor.offsets} was given twice by one writer.")
        code = SAFETENSORS_DTYPES[tensor.dtype][0]
        entries[key] = {"dtype": code, "shape": list(tensor.sizes), "data_offsets": [at, at + len(view)]}
        begins.append(at)
        at += len(view)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    boxes = [
        FileBox(name=t.name, offsets=tuple(t.offsets), sizes=tuple(t.sizes), start=len(header) + begin)
        for (t, _), begin in zip(pieces, begins, strict=True)
    ]
    return [memoryview(header), *(view for _, view in pieces)], BoxTable.of(boxes)


def chunk_size_for(boxes: Sequence[int]) -> int:
    """Bytes per chunk for a file with boxes of the given sizes in bytes.

    A reader with another layout needs parts of boxes, and must read the chunks at their edges whole. With 32 chunks per
    box that costs it a few per cent. Between 64 KiB (a digest is 32 bytes) and 4 MiB.
    """
    total = sum(boxes)
    typical = sum(size * size for size in boxes) // total if total else 0  # size of a byte's box, averaged over bytes
    return min(max(1 << max(typical // 32, 1).bit_length() - 1, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


def chunk_digests(parts: Sequence[memoryview], chunk_size_bytes: int) -> bytes:
    """BLAKE3 digest of every `chunk_size_bytes` of the concatenated `parts`, 32 bytes each. No part is copied."""
    digests: list[bytes] = []
    hasher, room = blake3(), chunk_size_bytes
    for part in parts:
        at = 0
        while at < len(part):
            step = min(room, len(part) - at)
            hasher.update(part[at : at + step])
            at, room = at + step, room - step
            if room == 0:
                digests.append(hasher.digest())
                hasher, room = blake3(), chunk_size_bytes
    if room < chunk_size_bytes:
        digests.append(hasher.digest())
    return b"".join(digests)


def _bytes_of(tensor: ShardTensor) -> memoryview:
    """The tensor's data as flat bytes, checked against its shape."""
    if tensor.dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"tensor {tensor.name!r}: dtype {tensor.dtype!r} cannot be written; known: {', '.join(SAFETENSORS_DTYPES)}."
        )
    if not is_within(tuple(tensor.shape), (tuple(tensor.offsets), tuple(tensor.sizes))):
        raise CheckpointError(
            f"tensor {tensor.name!r} of shape {tensor.shape}: the box at {tensor.offsets} of {tensor.sizes} is "
            "outside it. Give offsets and sizes with one number per dimension."
        )
    view = tensor.data.data if isinstance(tensor.data, np.ndarray) else tensor.data
    if not view.c_contiguous:
        raise CheckpointError(f"tensor {tensor.name!r}: its bytes are not contiguous. Give a contiguous copy.")
    expected = math.prod(tensor.sizes) * SAFETENSORS_DTYPES[tensor.dtype][1]
    if view.nbytes != expected:
        raise CheckpointError(
            f"tensor {tensor.name!r}: {tensor.sizes} of {tensor.dtype} is {expected} bytes, but {view.nbytes} "
            "were given."
        )
    return view.cast("B")

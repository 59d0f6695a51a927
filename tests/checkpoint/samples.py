"""Small checkpoints of every shape that the format allows, and ways to spoil them."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from raysharded.checkpoint.claims import Claims, commit_claimed
from raysharded.checkpoint.format import encoding
from raysharded.checkpoint.format.manifest import SAFETENSORS_DTYPES, FileRecord, Manifest, TensorInfo
from raysharded.checkpoint.format.paths import save_prefix
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.storage import Storage, Traits
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.checkpoint.writer import ShardTensor, commit, write_shard
from raysharded.testing.storages import rows_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Raw:
    """A tensor as its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


State = Mapping[str, Raw]


def raw(dtype: str, *shape: int, seed: int = 0) -> Raw:
    """A tensor of pseudo-random bytes that are the same on every machine."""
    size = int(np.prod(shape, dtype=np.int64)) * SAFETENSORS_DTYPES[dtype][1]
    data = blake3(f"{dtype}{shape}{seed}".encode()).digest(length=size) if size else b""
    return Raw(dtype=dtype, shape=shape, data=bytes(byte & 1 for byte in data) if dtype == "bool" else data)


def every_dtype() -> State:
    """Tensors of every element type in odd shapes, of no dimension, without elements, and with odd names."""
    state = {f"of.{dtype}": raw(dtype, 5, 3) for dtype in SAFETENSORS_DTYPES}
    return {
        **state,
        "scalar": raw("float64"),
        "empty": raw("float32", 0, 4),
        "empty.too": raw("int8", 7, 0),
        "name@with": raw("bfloat16", 4, 2, 3),
        "__metadata__": raw("uint8", 9),
        "名字": raw("int16", 6),
    }


def pieces_of(state: State, writer: int, num_writers: int) -> list[ShardTensor]:
    """The writer's rows of every tensor; tensors of no dimension are the first one's."""
    pieces: list[ShardTensor] = []
    for name, tensor in state.items():
        shape = tensor.shape
        first, last = rows_of(shape[0], writer, num_writers) if shape else (0, int(writer == 0))
        if first == last or 0 in shape:
            continue
        row = len(tensor.data) // (shape[0] if shape else 1)
        data = memoryview(tensor.data)[first * row : last * row]
        offsets, sizes = ((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])) if shape else ((), ())
        pieces.append(ShardTensor(name=name, dtype=tensor.dtype, shape=shape, offsets=offsets, sizes=sizes, data=data))
    return pieces


def save(
    storage: Storage,
    state: State,
    *,
    step: int = 7,
    save_id: str = "a",
    num_writers: int = 3,
    generation: int = 1,
    chunk: int | None = None,
    key: SigningKey | None = None,
    claims: Claims | None = None,
    run: str = "run",
    **fields: Any,
) -> str:
    """A save's prefix; it is committed, in a run if its `claims` are given. Small chunks make digest tables."""
    prefix = save_prefix(step, save_id)
    files: list[FileRecord] = []
    for number in range(num_writers):
        own = pieces_of(state, number, num_writers)
        files += write_shard(storage, prefix, writer=f"w{number:04d}", tensors=own, chunk_size_bytes=chunk)
    manifest = Manifest(
        run=run,
        step=step,
        generation=generation,
        save_id=save_id,
        writer=claims.writer if claims else "driver",
        created_at=0.0,
        tensors={name: TensorInfo(dtype=tensor.dtype, shape=tensor.shape) for name, tensor in state.items()},
        files=tuple(files),
        **fields,
    )
    if claims is not None:
        commit_claimed(storage, claims, prefix, manifest, key=key)
    else:
        assert commit(storage, prefix, manifest, key=key) is not None
    return prefix


def with_index(patch: pytest.MonkeyPatch) -> None:
    """Put the box index of every manifest into a separate file from now on."""
    patch.setattr(encoding, "MIN_BOXES", 1)


class SpreadStorage(LocalStorage):
    """A local folder where writers are spread over prefixes, as on S3."""

    __slots__ = ()

    @property
    def traits(self) -> Traits:
        return Traits(span_bytes=1 << 20, num_readers=2, partitioned=True)


def read_all(checkpoint: Any) -> dict[str, bytes]:
    """Every tensor in one request each."""
    return {
        name: checkpoint.read(name, (0,) * len(info.shape), info.shape).tobytes()
        for name, info in checkpoint.tensors.items()
    }


def bytes_of(state: State) -> dict[str, bytes]:
    return {name: tensor.data for name, tensor in state.items()}


def seal(body: Mapping[str, Any] | str, key: bytes | None = None) -> bytes:
    """A manifest of a writer that is wrong but seals, and signs, what it writes. `body`: fields, or JSON text."""
    text = body if isinstance(body, str) else json.dumps({k: v for k, v in body.items() if k not in ("digest", "hmac")})
    rest = b'",' + text.strip()[1:].encode("ascii")
    if key is not None:
        rest = b'","hmac":"' + hmac.new(key, rest, hashlib.sha256).hexdigest().encode() + rest
    return b'{"digest":"' + blake3(rest).hexdigest().encode() + rest


def reseal(storage: Storage, prefix: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes fields of the manifest in place and seals it again."""
    at = f"{prefix}/manifest.json"
    body = json.loads(storage.read(at))
    change(body)
    storage.write(at, [seal(body)])


def flipped(data: bytes, at: int, mask: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= mask
    return bytes(changed)

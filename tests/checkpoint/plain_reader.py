"""A checkpoint read as `docs/format.md` describes it, with public tools and nothing of raysharded.

Slow and simple: it reads everything, makes all checks of bytes that are a MUST for readers in the description, and
gives every tensor's bytes in C order.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from blake3 import blake3
from safetensors import safe_open

ITEM_BYTES = {
    **dict.fromkeys(["bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"], 1),
    **dict.fromkeys(["uint16", "int16", "float16", "bfloat16"], 2),
    **dict.fromkeys(["uint32", "int32", "float32"], 4),
    **dict.fromkeys(["uint64", "int64", "float64", "complex64"], 8),
}
SPREAD = re.compile(r"\.\./[0-9a-f]{2}/([^/]+)/[^/]+")


def read_checkpoint(folder: Path, key: bytes | None = None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(the manifest, unchanged, tensor -> its bytes). Raises ValueError for data that does not match its digest."""
    manifest = read_manifest((folder / "manifest.json").read_bytes(), key)
    boxes = boxes_of(manifest, folder)
    tensors = {
        name: (np.zeros((*shape, ITEM_BYTES[dtype]), np.uint8), np.zeros(shape, np.uint8))
        for name, (dtype, shape) in manifest["tensors"].items()
    }
    for number, file in enumerate(manifest["files"]):
        path, save = folder / file["path"], f"step-{manifest['step']:010d}-{manifest['save_id']}"
        spread = SPREAD.fullmatch(file["path"])
        if ".." in Path(file["path"]).parts and (spread is None or spread[1] != save):
            raise ValueError(f"{file['path']} leaves the folder")
        data = path.read_bytes()
        check_chunks(file, data, path.with_name(f"{path.name}.b3"))
        check_safetensors(path, [box[1:] for box in boxes if box[0] == number], manifest["tensors"], data)
        for at, name, offsets, sizes, start in boxes:
            if at == number:
                cells, count = tensors[name]
                item_bytes = cells.shape[-1]
                part = np.frombuffer(data, np.uint8, math.prod(sizes) * item_bytes, start)
                where = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                cells[where] = part.reshape(*sizes, item_bytes)
                count[where] += 1
    for name, (_, count) in tensors.items():
        if not (count == 1).all():
            raise ValueError(f"the boxes of {name} do not tile it")
    return manifest, {name: cells.tobytes() for name, (cells, _) in tensors.items()}


def read_manifest(data: bytes, key: bytes | None = None) -> dict[str, Any]:
    if data[:11] != b'{"digest":"' or data[11:75] != blake3(data[75:]).hexdigest().encode():
        raise ValueError("manifest.json does not match its digest")
    if key is not None:
        signature = hmac.new(key, data[149:], hashlib.sha256).hexdigest().encode()
        if data[75:85] != b'","hmac":"' or data[85:149] != signature:
            raise ValueError("manifest.json is not signed with the key")
    manifest: dict[str, Any] = json.loads(data.decode("ascii"))
    if manifest["format"] != "raysharded-checkpoint" or manifest["version"] not in (1, 2):
        raise ValueError("not a checkpoint that this reader knows")
    return manifest


def boxes_of(manifest: dict[str, Any], folder: Path) -> list[tuple[int, str, list[int], list[int], int]]:
    """(number of the file, tensor, offsets, sizes, start) of every box."""
    if "index" not in manifest:
        return [(number, *box) for number, file in enumerate(manifest["files"]) for box in file["boxes"]]
    path = folder / manifest["index"]["path"]
    data = path.read_bytes()
    if len(data) != manifest["index"]["size_bytes"] or blake3(data).hexdigest() != manifest["index"]["digest"]:
        raise ValueError(f"{path.name} does not match its digest")
    boxes = []
    for row in pq.read_table(path).to_pylist():
        dims = range(len(manifest["tensors"][row["tensor"]][1]))
        offsets, sizes = [row[f"offset_{dim}"] for dim in dims], [row[f"size_{dim}"] for dim in dims]
        boxes.append((row["file"], row["tensor"], offsets, sizes, row["start"]))
    return boxes


def check_chunks(file: dict[str, Any], data: bytes, table_path: Path) -> None:
    if "digest_table" in file:
        table = table_path.read_bytes()
        if blake3(table).hexdigest() != file["digest_table"]:
            raise ValueError(f"{table_path.name} does not match its digest")
        digests = [table[at : at + 32].hex() for at in range(0, len(table), 32)]
    else:
        digests = file["digests"]
    size = file["chunk_size_bytes"]
    found = [blake3(data[at : at + size]).hexdigest() for at in range(0, len(data), size)]
    if len(data) != file["size_bytes"] or found != digests:
        raise ValueError(f"{file['path']} does not match its digests")


def check_safetensors(
    path: Path, boxes: list[tuple[str, list[int], list[int], int]], tensors: dict[str, Any], data: bytes
) -> None:
    """Check that the safetensors library finds every box under the key that the description gives it."""
    keys = {key_of(name, tensors[name][1], offsets, sizes): (name, start) for name, offsets, sizes, start in boxes}
    with safe_open(str(path), framework="pt") as shard:
        if set(shard.keys()) != set(keys):
            raise ValueError(f"{path.name} has other tensors than the manifest says")
        for key, (name, start) in keys.items():
            found = raw_bytes(shard.get_tensor(key))
            if found != data[start : start + len(found)] or str(shard.get_tensor(key).dtype)[6:] != tensors[name][0]:
                raise ValueError(f"{path.name}: {key} is another tensor")


def key_of(name: str, shape: list[int], offsets: list[int], sizes: list[int]) -> str:
    plain = sizes == shape and "@" not in name and name != "__metadata__"
    return name if plain else f"{name}@{','.join(map(str, offsets))}"


def raw_bytes(tensor: Any) -> bytes:
    """The bytes of a torch tensor."""
    import torch

    flat: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return flat

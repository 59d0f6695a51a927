"""What ranks tell each other about the files that they wrote, as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from raysharded.checkpoint.format.boxes import BoxTable
from raysharded.checkpoint.format.manifest import FileRecord


def to_json(file: FileRecord) -> dict[str, Any]:
    """Law: from_json(to_json(file)) == file."""
    boxes = file.boxes
    return {
        "path": file.path,
        "size_bytes": file.size_bytes,
        "chunk_size_bytes": file.chunk_size_bytes,
        "digests": file.digests.hex(),
        "digest_table": file.digest_table,
        "names": boxes.names,
        "tensor": boxes.tensor.tolist(),
        "ndim": boxes.ndim.tolist(),
        "offsets": boxes.offsets.tolist(),
        "sizes": boxes.sizes.tolist(),
        "start": boxes.start.tolist(),
    }


def from_json(value: dict[str, Any]) -> FileRecord:
    count = len(value["start"])
    return FileRecord(
        path=value["path"],
        size_bytes=value["size_bytes"],
        chunk_size_bytes=value["chunk_size_bytes"],
        digests=bytes.fromhex(value["digests"]),
        digest_table=value["digest_table"],
        boxes=BoxTable(
            names=tuple(value["names"]),
            tensor=np.array(value["tensor"], np.int32),
            ndim=np.array(value["ndim"], np.int32),
            offsets=np.array(value["offsets"], np.int64).reshape(count, -1),
            sizes=np.array(value["sizes"], np.int64).reshape(count, -1),
            start=np.array(value["start"], np.int64),
        ),
    )

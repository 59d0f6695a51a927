"""A small run on storage, for tests: it owns its claims, saves, and breaks off saves where the test requests it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from raysharded.checkpoint import Claims, Storage, open_storage, save_prefix
from raysharded.checkpoint.retention.catalog import CheckpointRef, list_checkpoints
from raysharded.checkpoint.storage import Traits
from raysharded.testing.storages import CountingStorage, save_rows
from tests.paths import GOLDEN

GOLDEN_V1 = GOLDEN / "v1" / "checkpoints" / "step-0000000007-golden1"


class Partitioned(CountingStorage):
    """Reports that it is partitioned, as S3: data files of one save lie apart."""

    @property
    def traits(self) -> Traits:
        return Traits(span_bytes=1 << 20, num_readers=2, partitioned=True)


def storage_of(kind: str, path: Path) -> Storage:
    """A separate storage: a folder, fsspec's memory, or a folder used as partitioned storage."""
    inner = open_storage(f"memory://{path}" if kind == "memory" else str(path))
    return Partitioned(inner) if kind == "partitioned" else inner


@pytest.fixture(params=["local", "memory", "partitioned"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return storage_of(request.param, tmp_path / "run")


@dataclass
class Run:
    """One driver's run; another `Run` over the same storage is the next driver."""

    storage: Storage
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of every checkpoint, besides its metrics."""

    def __post_init__(self) -> None:
        self.claims = Claims(self.storage, "driver")
        self.generation = self.claims.own(1)

    def save(self, step: int, metrics: Mapping[str, Any] | None = None) -> str:
        """A committed save of the run's generation."""
        return self._save(step, claims=self.claims, metrics=metrics)

    def unclaimed(self, step: int) -> str:
        """A save whose writer ended between the manifest and the claim."""
        return self._save(step, claims=None, metrics=None)

    def unfinished(self, step: int) -> str:
        """A save whose writer ended before the manifest."""
        prefix = self.unclaimed(step)
        self.storage.delete([f"{prefix}/manifest.json"])
        return prefix

    def _save(self, step: int, claims: Claims | None, metrics: Mapping[str, Any] | None) -> str:
        return save_rows(
            self.storage,
            {"w": np.arange(20, dtype=np.float32) + step},
            step=step,
            save_id=f"g{self.generation:06d}",
            num_writers=2,
            metadata={**self.metadata, **({"metrics": dict(metrics)} if metrics else {})} or None,
            generation=self.generation,
            claims=claims,
        )


def save_v1(storage: Storage, step: int, save_id: str = "old") -> str:
    """A checkpoint of format version 1, as raysharded wrote them before there were claims."""
    prefix = save_prefix(step, save_id)
    for file in GOLDEN_V1.iterdir():
        data = file.read_bytes()
        if file.name == "manifest.json":
            body = json.loads(data) | {"step": step, "save_id": save_id}
            del body["digest"]
            rest = b'",' + json.dumps(body, sort_keys=True, separators=(",", ":"))[1:].encode() + b"\n"
            data = b'{"digest":"' + blake3(rest).hexdigest().encode() + rest
        storage.write(f"{prefix}/{file.name}", [data])
    return prefix


def ref_of(storage: Storage, prefix: str) -> CheckpointRef:
    """The save in a folder, as it is now."""
    [ref] = [ref for ref in list_checkpoints(storage) if ref.prefix == prefix]
    return ref


def states(storage: Storage) -> list[tuple[int, str]]:
    """(step, state) of every save."""
    return [(ref.step, ref.state) for ref in list_checkpoints(storage)]

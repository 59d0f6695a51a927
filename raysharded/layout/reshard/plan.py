"""Input and output of the planner: copies of the state, a target layout, and the plan between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.layout.mesh import Mesh
from raysharded.layout.sharding import require_rank

Medium = Literal["snapshot", "mirror", "storage"]

STORAGE = -1
"""Value of `Plan.src_worker` for bytes that come from storage."""
SNAPSHOT_BUFFER = 0
"""Value of `Plan.dst_kind` for the buffer of a rank's own shard."""
MIRROR_BUFFER = 1
"""Value of `Plan.dst_kind` for the buffer that holds a copy of another rank's."""


def mirror_of(rank: int, world_size: int, apart: int = 1) -> int:
    """The rank whose buffer `rank` mirrors: `apart` (see `Mesh`) before it; ranks wrap around.

    Laws: a permutation of the ranks; never `rank` itself, which is why one worker alone has no mirror. Raises
    ConfigError for a world size below 2, or one that divides `apart`.
    """
    require_rank(world_size, rank)
    if world_size < 2:
        raise ConfigError("mirror_of: one worker alone has no mirror; need world_size >= 2.")
    if apart % world_size == 0:
        raise ConfigError(f"mirror_of: apart={apart} of {world_size} ranks: a rank cannot mirror itself.")
    return (rank - apart) % world_size


def keeper_of(rank: int, world_size: int, apart: int = 1) -> int:
    """The rank that holds the mirror of `rank`'s buffer: the inverse of `mirror_of`, with its errors."""
    mirror_of(rank, world_size, apart)
    return (rank + apart) % world_size


def has_mirrors(mesh: Mesh) -> bool:
    """True if workers hold mirrors of each other, where mirrors are wanted: not if another replica holds the same."""
    return mesh.replicas == 1 and mesh.shards > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """The state laid out flat over `world_size` ranks, and the current holder of each rank's buffer (None: lost).

    A "mirror" copy has the same buffers as a "snapshot" of its world size; `holders[r]` is the worker whose mirror
    buffer has rank `r`'s bytes. In one copy a worker holds one buffer. A "storage" copy is complete, and its holders
    are ignored.
    """

    medium: Medium
    world_size: int
    holders: tuple[WorkerId | None, ...] = ()
    tensor: int = 1
    """Tensor parallel degree: buffer `r` is that of tensor rank `r % tensor`, as in `Mesh`."""
    layout_id: int = 0
    """Id of the layout that the buffers belong to; means nothing to the planner."""

    def __post_init__(self) -> None:
        require_rank(self.world_size, 0)
        if self.medium != "storage" and len(self.holders) != self.world_size:
            raise ConfigError(
                f"Copy: {len(self.holders)} holders for {self.world_size} ranks; give one (or None) each."
            )
        _require_ids(holder for holder in self.holders if holder is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Intended holders of the state: `workers[r]` is rank `r` of a mesh of `replicas` and degree `tensor`.

    With `mirrors`, one replica and more than one worker, each also holds the mirror of the rank `apart` before it.
    Several replicas are each other's mirrors.

    Raises ConfigError for workers that cannot be such a mesh, or mirrors.
    """

    workers: tuple[WorkerId, ...]
    mirrors: bool
    replicas: int = 1
    tensor: int = 1
    apart: int = 1

    def __post_init__(self) -> None:
        if not self.workers or len(set(self.workers)) != len(self.workers):
            raise ConfigError(f"Target.workers={self.workers}: give one or more workers, each once.")
        if self.replicas < 1 or len(self.workers) % self.replicas:
            raise ConfigError(f"Target: {len(self.workers)} workers cannot be {self.replicas} replicas of one size.")
        _require_ids(self.workers)
        mesh = self.mesh  # raises for workers that cannot form one
        if self.mirrors and has_mirrors(mesh):
            mirror_of(0, self.world_size, self.apart)

    @classmethod
    def of(cls, workers: tuple[WorkerId, ...], mesh: Mesh, *, mirrors: bool) -> Target:
        """Target of a mesh with these workers, by rank."""
        return cls(workers=workers, mirrors=mirrors, replicas=mesh.replicas, tensor=mesh.tensor, apart=mesh.apart)

    @property
    def world_size(self) -> int:
        return len(self.workers)

    @property
    def mesh(self) -> Mesh:
        shards = self.world_size // self.replicas
        return Mesh(replicas=self.replicas, shards=shards, tensor=self.tensor, apart=self.apart)

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """Buffers that the workers of each replica need, as (kind, replica), by kind."""
        own = tuple((SNAPSHOT_BUFFER, replica) for replica in range(self.replicas))
        return (*own, (MIRROR_BUFFER, 0)) if self.mirrors and has_mirrors(self.mesh) else own


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """Result if the state cannot be put together: bytes that no worker holds."""

    ranges: tuple[tuple[str, int, int], ...]
    """The first few ranges, as (tensor name, first row, row behind the last), in the spec's order."""
    total_bytes: int
    """Number of all missing bytes, each counted once."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Transfers of bytes, one per row of the columns, in canonical order: (target buffer, content rank, dst_offset).

    Row `i`: `nbytes[i]` bytes at `src_offset[i]` of the buffer of rank `src_rank[i]` in `copies[copy[i]]`, held by
    `src_worker[i]` (`STORAGE`: read from storage), go to `dst_offset[i]` of buffer `dst_kind[i]` of `dst_worker[i]`,
    the target's rank `dst_rank[i]`. `line_start[i]` is the position of the first byte on the state's line.

    The rows for one pair of workers have the same order in the sender's `sends` and the receiver's `receives`. So bytes
    packed in this order need no header.
    """

    src_worker: NDArray[np.int64]
    copy: NDArray[np.int32]
    src_rank: NDArray[np.int32]
    src_offset: NDArray[np.int64]
    dst_worker: NDArray[np.int64]
    dst_rank: NDArray[np.int32]
    dst_kind: NDArray[np.int32]
    dst_offset: NDArray[np.int64]
    line_start: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.nbytes)

    def take(self, rows: NDArray[np.intp]) -> Plan:
        """The given rows, in the given order."""
        return Plan(
            src_worker=self.src_worker[rows],
            copy=self.copy[rows],
            src_rank=self.src_rank[rows],
            src_offset=self.src_offset[rows],
            dst_worker=self.dst_worker[rows],
            dst_rank=self.dst_rank[rows],
            dst_kind=self.dst_kind[rows],
            dst_offset=self.dst_offset[rows],
            line_start=self.line_start[rows],
            nbytes=self.nbytes[rows],
        )

    def sends(self, worker: WorkerId) -> Plan:
        """Rows that `worker` sends to others, by receiver's id, then in canonical order."""
        rows = np.flatnonzero((self.src_worker == worker) & (self.dst_worker != worker))
        return self.take(rows[np.argsort(self.dst_worker[rows], kind="stable")])

    def receives(self, worker: WorkerId) -> Plan:
        """Rows that `worker` receives from others, by sender's id, then in canonical order."""
        rows = np.flatnonzero((self.dst_worker == worker) & (self.src_worker != worker) & (self.src_worker != STORAGE))
        return self.take(rows[np.argsort(self.src_worker[rows], kind="stable")])

    def local(self, worker: WorkerId) -> Plan:
        """Rows that `worker` copies from its own old buffers."""
        return self.take(np.flatnonzero((self.dst_worker == worker) & (self.src_worker == worker)))

    def reads(self, worker: WorkerId) -> Plan:
        """Rows that `worker` reads from storage."""
        return self.take(np.flatnonzero((self.dst_worker == worker) & (self.src_worker == STORAGE)))

    @property
    def wire_bytes(self) -> int:
        """Bytes that go from one worker to another."""
        return int(self.nbytes[(self.src_worker != self.dst_worker) & (self.src_worker != STORAGE)].sum())

    @property
    def bytes_from_storage(self) -> int:
        """Bytes read from storage."""
        return int(self.nbytes[self.src_worker == STORAGE].sum())

    @property
    def total_bytes(self) -> int:
        """All bytes, including those that stay with their worker."""
        return int(self.nbytes.sum())


def _require_ids(workers: Iterable[WorkerId]) -> None:
    """Raise ConfigError for numbers below 0: they stand for storage and for no worker."""
    lowest = min(workers, default=0)
    if lowest < 0:
        raise ConfigError(f"worker {lowest}: the number of a worker is 0 or more.")

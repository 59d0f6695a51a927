"""A worker's position in a generation, and its buffers there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from raysharded import numerics
from raysharded.actors.comm.groups import Rendezvous
from raysharded.actors.model.param_layout import Replication
from raysharded.actors.reduction.gradient_exchange import Hosts, hosts_of
from raysharded.actors.shards.store import HostMedium, ShardBuffer, ShardStore
from raysharded.config import EngineConfig
from raysharded.ids import WorkerId
from raysharded.layout import (
    MIRROR_BUFFER,
    SNAPSHOT_BUFFER,
    Mesh,
    Parity,
    Share,
    StateSpec,
    has_mirrors,
    mirror_of,
    parity_of,
    shard_map,
)
from raysharded.layout.parity import length_of_block
from raysharded.protocol.job import Job
from raysharded.protocol.messages import FromMemory, GenerationSpec

MEETING_TIMEOUT_S = 30.0
"""Seconds for which a generation prepared in the background waits for its members."""
ARRIVAL_TIMEOUT_S = 60.0
"""Seconds for which a forming generation waits for its members; the driver interrupts it when one is lost."""
SOURCES_TIMEOUT_S = 600.0
"""Seconds for which workers with a failed device wait for the members: these build their models first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPosition:
    """A worker's position in the generation to be restored."""

    spec: GenerationSpec
    worker: WorkerId
    mirrors: bool
    parity: Parity | None = None
    """Parity in place of mirrors, if there are workers enough."""

    @classmethod
    def of(cls, spec: GenerationSpec, worker: WorkerId, engine: EngineConfig) -> RankPosition:
        """The position of a worker that need not be a member."""
        parity = parity_of(engine.redundancy, spec.tensor, spec.apart)
        return cls(spec=spec, worker=worker, mirrors=engine.mirrors, parity=parity)

    def number_of(self, rule: str) -> int:
        """Number of a rule (`raysharded.numerics`) under which the run computes, for code that knows several."""
        return numerics.number_of(self.spec.numerics, rule)

    @property
    def rank(self) -> int:
        return self.spec.members.index(self.worker)

    @property
    def mesh(self) -> Mesh:
        return self.spec.mesh

    @property
    def replica(self) -> int:
        return self.mesh.replica_of(self.rank)

    @property
    def shard(self) -> int:
        return self.mesh.shard_of(self.rank)

    @property
    def tensor_rank(self) -> int:
        """Position in the tensor parallel group."""
        return self.mesh.tensor_of(self.rank)

    @property
    def hosts(self) -> Hosts:
        """Data shards of this worker's group on each host, those of its tensor rank."""
        mesh, nodes = self.mesh, self.spec.nodes
        return hosts_of(
            [nodes[rank] for rank in mesh.group(self.replica)[self.tensor_rank :: mesh.tensor]] if nodes else []
        )

    def speaks_for(self, holders: Replication) -> bool:
        """True if this worker reports what all these holders have."""
        match holders:
            case Replication.ONE:
                return self.replica == 0
            case Replication.TENSOR_GROUP:
                return self.replica == 0 and self.tensor_rank == 0
            case Replication.EVERYONE:
                return self.rank == 0

    @property
    def share(self) -> Share:
        """The part of its shard that this worker writes; the other replicas hold the shard, too."""
        return Share(index=self.replica, of=self.mesh.replicas)

    @property
    def has_parity(self) -> bool:
        return self.parity is not None and self.parity.protects(self.mesh)

    @property
    def has_mirror(self) -> bool:
        return self.mirrors and not self.has_parity and has_mirrors(self.mesh)

    def expect_shards(self, store: ShardStore, size_bytes: int) -> None:
        """Announce the layout to the store. `size_bytes`: of the largest shard, once the optimizer has state."""
        own, others = [size_bytes] * 2, list[int]()
        if self.has_mirror:
            others = own
        elif self.has_parity and self.parity is not None:
            others = [self.parity.m * length_of_block(size_bytes, self.parity)] * 2
        store.expect([*own, *others])

    def expect(self, store: ShardStore) -> None:
        """Announce the layout to the store, if the state comes from memory: its size is known before it is built."""
        if isinstance(self.spec.source, FromMemory):
            largest = shard_map(self.spec.source.spec, self.mesh.shards, 0, self.mesh.tensor)
            self.expect_shards(store, largest.size_bytes)

    def begin(
        self, store: ShardStore, state: StateSpec, kept: Mapping[int, ShardBuffer] | None = None
    ) -> dict[int, ShardBuffer]:
        """The buffers of the generation's source, by the plan's `dst_kind`.

        `kept`: buffers of an older layout that have the bytes already; the others are to be filled.
        """
        generation = self.spec.generation
        media: dict[int, HostMedium] = {SNAPSHOT_BUFFER: "snapshot", MIRROR_BUFFER: "mirror"}
        targets = {kind: store.share(old, generation, media[kind], state) for kind, old in (kept or {}).items()}
        if SNAPSHOT_BUFFER not in targets:
            targets[SNAPSHOT_BUFFER] = self.begin_own(store, state)
        if self.has_mirror and MIRROR_BUFFER not in targets:
            targets[MIRROR_BUFFER] = self.begin_mirror(store, self.spec.source.step, state)
        return targets

    def begin_own(self, store: ShardStore, state: StateSpec) -> ShardBuffer:
        """The buffer for this worker's own shard."""
        return self.begin_snapshot(store, self.spec.source.step, state)

    def begin_snapshot(self, store: ShardStore, step: int, state: StateSpec) -> ShardBuffer:
        """A buffer for this worker's own shard as it is after a step."""
        return self._begin(store, step, "snapshot", self.shard, state)

    def begin_mirror(self, store: ShardStore, step: int, state: StateSpec) -> ShardBuffer:
        """A buffer for the shard whose mirror this worker holds."""
        return self._begin(store, step, "mirror", mirror_of(self.shard, self.mesh.shards, self.mesh.apart), state)

    def _begin(self, store: ShardStore, step: int, medium: HostMedium, shard: int, state: StateSpec) -> ShardBuffer:
        mesh = self.mesh
        return store.begin(step, self.spec.generation, medium, mesh.shards, shard, state, degree=mesh.tensor)


def with_sources(spec: GenerationSpec) -> GenerationSpec:
    """A spec as if workers with a failed device were members, too, in one group: the group in which memory moves."""
    return replace(spec, members=(*spec.members, *spec.failed_devices), replicas=1, tensor=1, apart=1)


def rendezvous_of(spec: GenerationSpec, worker: WorkerId, job: Job, arrival_timeout_s: float) -> Rendezvous:
    """Rendezvous of the worker with the other members of the generation."""
    return Rendezvous(
        host=spec.host,
        port=spec.port,
        prefix=spec.prefix,
        secret=spec.secret,
        rank=spec.members.index(worker),
        mesh=spec.mesh,
        arrival_timeout_s=arrival_timeout_s,
        collective_timeout_s=job.collective_timeout_s,
    )

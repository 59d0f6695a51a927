"""Where a worker stands in a generation, and the buffers it keeps there."""

from __future__ import annotations

from dataclasses import dataclass

from raysharded.actors.shards import ShardBuffer, ShardStore
from raysharded.driver.messages import GenerationSpec
from raysharded.ids import WorkerId
from raysharded.layout import MIRROR_BUFFER, SNAPSHOT_BUFFER, StateSpec, mirror_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a worker stands in the generation to be restored."""

    spec: GenerationSpec
    worker: WorkerId
    mirrors: bool

    @property
    def rank(self) -> int:
        return self.spec.members.index(self.worker)

    @property
    def has_mirror(self) -> bool:
        return self.mirrors and self.spec.world_size > 1

    def begin(self, store: ShardStore, state: StateSpec) -> dict[int, ShardBuffer]:
        """The buffers to fill, by the plan's `dst_kind`."""
        targets = {SNAPSHOT_BUFFER: self.begin_own(store, state)}
        if self.has_mirror:
            step, layout, world = self.spec.source.step, self.spec.generation, self.spec.world_size
            source = mirror_of(self.rank, world)
            targets[MIRROR_BUFFER] = store.begin(step, layout, "mirror", world, source, state)
        return targets

    def begin_own(self, store: ShardStore, state: StateSpec) -> ShardBuffer:
        """The buffer for this worker's own shard."""
        spec = self.spec
        return store.begin(spec.source.step, spec.generation, "snapshot", spec.world_size, self.rank, state)

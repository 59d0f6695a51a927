"""Gives a new generation its state: each worker's own shard, and the mirror it keeps, filled and held twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from raysharded.actors.initial import initial_tensors
from raysharded.actors.live import LiveState, fill_initial
from raysharded.actors.process_group import Groups
from raysharded.actors.shards import ShardBuffer, ShardStore
from raysharded.actors.transfer import exchange
from raysharded.checkpoint import Checkpoint, Storage, open_checkpoint
from raysharded.driver.messages import FromCheckpoint, FromMemory, FromStart, GenerationSpec, Job
from raysharded.errors import CheckpointError
from raysharded.ids import WorkerId
from raysharded.layout import Missing, StateSpec, Target, TensorSpec, make_plan, mirror_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """The filled buffer of the worker's own shard, and how its bytes came."""

    own: ShardBuffer
    bytes_received: int
    bytes_read: int


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
        step, layout, world = self.spec.source.step, self.spec.generation, self.spec.world_size
        targets = {0: store.begin(step, layout, "snapshot", world, self.rank, state)}
        if self.has_mirror:
            targets[1] = store.begin(step, layout, "mirror", world, mirror_of(self.rank, world), state)
        return targets


def restore(
    place: Place,
    job: Job,
    live: LiveState,
    store: ShardStore,
    storage: Storage,
    groups: Groups,
    probe: Callable[[str], None],
) -> Restored:
    """Fill this worker's buffers from the generation's source. Every member must call it."""
    match place.spec.source:
        case FromMemory(step=step, spec=state, copies=copies):
            targets = place.begin(store, state)
            plan = make_plan(
                state, copies, Target(workers=place.spec.members, mirrors=place.mirrors), worker=place.worker
            )
            if isinstance(plan, Missing):
                raise CheckpointError(f"step {step} cannot be put together from memory: {plan}")
            received = exchange(plan, copies, store, step, targets, place.spec.members, place.worker, groups, probe)
            read = 0
        case FromCheckpoint(prefix=prefix):
            checkpoint = open_checkpoint(storage, prefix)
            targets = place.begin(store, spec_of(checkpoint))
            received, read = 0, _read(checkpoint, targets)
        case FromStart():
            targets = place.begin(store, live.spec(with_optimizer=False))
            _draw(job, targets)
            received = read = 0
    for buffer in targets.values():
        buffer.complete = True
    return Restored(own=targets[0], bytes_received=received, bytes_read=read)


def spec_of(checkpoint: Checkpoint) -> StateSpec:
    """The state's spec from a manifest, in the order that live states use."""
    return StateSpec(
        tensors=tuple(
            TensorSpec(name=name, dtype=info.dtype, shape=tuple(info.shape), replicated=name.startswith("buffer."))
            for name, info in sorted(checkpoint.tensors.items())
        )
    )


def _read(checkpoint: Checkpoint, targets: dict[int, ShardBuffer]) -> int:
    requests = [
        (piece.tensor.name, piece.offsets, piece.sizes, buffer.data.numpy()[piece.place])
        for buffer in targets.values()
        for piece in buffer.pieces.pieces(buffer.spec)
    ]
    checkpoint.read_many(requests)
    return sum(len(request[3]) for request in requests)


def _draw(job: Job, targets: dict[int, ShardBuffer]) -> None:
    expected = {tensor.name for buffer in targets.values() for tensor in buffer.spec.tensors}
    drawn: set[str] = set()
    with torch.no_grad():
        for tensors in initial_tensors(job.task, job.batch.seed):
            for buffer in targets.values():
                fill_initial(buffer.data, buffer.spec, buffer.pieces, tensors)
            drawn |= tensors.keys()
    if missing := sorted(expected - drawn):
        raise CheckpointError(
            f"{len(missing)} tensors got no initial values, first {missing[0]!r}; does build_model give the same model "
            "every time?"
        )

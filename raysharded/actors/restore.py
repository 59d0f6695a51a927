"""Gives a new generation its state: each worker's own shard, and the mirror or the parity blocks it keeps.

What was lost with workers and can be computed from parity blocks is computed first; the plan then takes it as held.

Every byte is read from a checkpoint once: each worker of the first replica reads its own shard, rank 0 what all of them
hold whole, and the rest comes from the other workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from raysharded.actors.initial import initial_tensors
from raysharded.actors.live import LiveState, fill_initial, is_replicated
from raysharded.actors.mirror import Keeper
from raysharded.actors.place import Place
from raysharded.actors.process_group import Groups
from raysharded.actors.rebuilding import rebuild
from raysharded.actors.shards import ShardBuffer, ShardStore
from raysharded.actors.transfer import broadcast, exchange, pass_on
from raysharded.checkpoint import Checkpoint, Storage, open_checkpoint, open_storage
from raysharded.driver.messages import FromCheckpoint, FromMemory, FromStart, Job
from raysharded.errors import CheckpointError
from raysharded.layout import MIRROR_BUFFER, SNAPSHOT_BUFFER, Missing, StateSpec, Target, TensorSpec, make_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """The filled buffer of the worker's own shard, and how its bytes came."""

    own: ShardBuffer
    bytes_received: int
    bytes_read: int


def restore(
    place: Place,
    job: Job,
    live: LiveState,
    store: ShardStore,
    storage: Storage,
    groups: Groups,
    keeper: Keeper,
    probe: Callable[[str], None],
) -> Restored:
    """Fill this worker's buffers from the generation's source. Every member must call it."""
    match place.spec.source:
        case FromMemory(step=step, spec=state, copies=copies, rebuilds=rebuilds):
            received = rebuild(rebuilds, step, state, store, place.spec.members, place.worker, groups)
            targets = place.begin(store, state)
            plan = make_plan(
                state,
                copies,
                Target(workers=place.spec.members, mirrors=place.has_mirror, replicas=place.mesh.replicas),
                worker=place.worker,
            )
            if isinstance(plan, Missing):
                raise CheckpointError(f"step {step} cannot be put together from memory: {plan}")
            received += exchange(plan, copies, store, step, targets, place.spec.members, place.worker, groups, probe)
            read = 0
        case FromCheckpoint(prefix=prefix, digest=digest, url=url):
            checkpoint = open_checkpoint(open_storage(url) if url else storage, prefix, digest=digest)
            own = place.begin_own(store, spec_of(checkpoint, live.replicated))
            read = _read(checkpoint, own) if place.replica == 0 else 0
            received = _share(own, groups, probe)
            targets = {SNAPSHOT_BUFFER: own}
        case FromStart():
            targets = place.begin(store, live.spec(with_optimizer=False))
            _draw(job, targets)
            received = read = 0
    for buffer in targets.values():
        buffer.complete = True
    if MIRROR_BUFFER not in targets:
        keeper.start(targets[SNAPSHOT_BUFFER])
        received += keeper.join()
    return Restored(own=targets[SNAPSHOT_BUFFER], bytes_received=received, bytes_read=read)


def spec_of(checkpoint: Checkpoint, replicated: Collection[str] = ()) -> StateSpec:
    """The state's spec from a manifest, in the order that live states use. `replicated`: the parameters that every
    worker is to have whole."""
    return StateSpec(
        tensors=tuple(
            TensorSpec(name=name, dtype=info.dtype, shape=tuple(info.shape), replicated=is_replicated(name, replicated))
            for name, info in sorted(checkpoint.tensors.items())
        )
    )


def _read(checkpoint: Checkpoint, own: ShardBuffer) -> int:
    """Fill the shard but for what rank 0 reads for all; the bytes read from storage."""
    data = own.data.numpy()
    return checkpoint.read_many(
        (piece.tensor.name, piece.offsets, piece.sizes, data[piece.place])
        for piece in own.pieces.pieces(own.spec)
        if not piece.tensor.replicated or own.rank == 0
    )


def _share(own: ShardBuffer, groups: Groups, probe: Callable[[str], None]) -> int:
    """Take what rank 0 read for all and what the first replica read; the bytes received."""
    if groups.world_size == 1:
        return 0
    probe("transfer")
    data = own.data.numpy()
    received = broadcast([data[p.place] for p in own.pieces.pieces(own.spec) if p.tensor.replicated], groups)
    return received + pass_on(own.data, groups)


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

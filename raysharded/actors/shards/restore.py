"""State of a new generation: each worker's own shard, and the mirror or parity blocks that it holds.

Lost buffers that parity blocks can restore are computed first; the plan then takes them as held.

Every byte is read from a checkpoint once. Each worker of the first replica reads its own shard. Rank 0 reads what all
hold whole, the first of each tensor parallel group what its workers have in common. The rest comes from other workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch

from raysharded.actors.comm.abortable_wait import keep_until_ended
from raysharded.actors.comm.groups import Groups
from raysharded.actors.comm.host_group import DeviceExchange, HostGroup
from raysharded.actors.model.drawn_constants import drawn_first, refuse_drawn
from raysharded.actors.model.init_weights import FirstBuild, first_build
from raysharded.actors.model.inventory import Item, first_value
from raysharded.actors.model.param_layout import CONSTANT, ParamLayout, Replication
from raysharded.actors.optimizer.loaded_state import remark_added
from raysharded.actors.optimizer.registered_state import RegisteredState
from raysharded.actors.shards import initial_weights, position
from raysharded.actors.shards.device_state import DeviceState, dtype_name, fill_initial, state_spec
from raysharded.actors.shards.mirror import SnapshotReplicator
from raysharded.actors.shards.position import RankPosition
from raysharded.actors.shards.rebuild import rebuild
from raysharded.actors.shards.store import ShardBuffer, ShardStore
from raysharded.actors.shards.transfer import broadcast, exchange, kept_buffers, pass_on
from raysharded.actors.task_calls.remarks import Say
from raysharded.checkpoint import Checkpoint, Storage, open_checkpoint, open_storage
from raysharded.errors import CheckpointError, CollectiveAborted
from raysharded.ids import WorkerId
from raysharded.layout import MIRROR_BUFFER, SNAPSHOT_BUFFER, Missing, Piece, Plan, StateSpec, Target, make_plan
from raysharded.protocol.job import Job
from raysharded.protocol.messages import REGISTERED_STATE, FromCheckpoint, FromMemory, FromStart, GenerationSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """The filled buffer of the worker's own shard, with the bytes received and read for it."""

    own: ShardBuffer
    bytes_received: int
    bytes_read: int
    added: frozenset[str] = frozenset()
    """Names in the state of tensors that the checkpoint lacks: they have the values of a run's start."""
    given: initial_weights.Source | None = None
    """The weights that a run begins with, at its start."""

    def remark(self, say: Say) -> None:
        """Report differences between the checkpoint and the model."""
        if self.given is not None:
            say("start_from", self.given.sentence())
        else:
            remark_added(self.added, say)


def restore(
    place: RankPosition,
    job: Job,
    live: DeviceState,
    store: ShardStore,
    storage: Storage,
    groups: Groups,
    keeper: SnapshotReplicator,
    probe: Callable[[str], None],
    agree: Callable[[Iterable[Item]], None],
    *,
    is_loop: bool,
) -> Restored:
    """Fill this worker's buffers from the generation's source. Every member must call it.

    `agree`: called once the contents of the state are known, with those that were drawn. It compares what the members
    have built. `is_loop`: as for `serve`, and `hand_over` has been called.
    """
    everyone, build_seed = position.with_sources(place.spec).members, place.spec.build_seed
    missing: Collection[str] = ()
    given: initial_weights.Source | None = None
    match place.spec.source:
        case FromMemory(step=step, spec=state, copies=copies, rebuilds=rebuilds) as source:
            live.carry(_constants_in(state))
            agree(())
            memory = groups.with_sources or groups
            received = rebuild(rebuilds, step, state, store, everyone, place.worker, memory)
            plan, target = _plan(place, source)
            kept = kept_buffers(plan, copies, target, store, step, place.worker)
            targets = place.begin(store, state, kept)
            received += exchange(
                plan,
                copies,
                store,
                step,
                {kind: buffer for kind, buffer in targets.items() if kind not in kept},
                everyone,
                place.worker,
                _in_bulk(groups),
                probe,
            )
            read = 0
        case FromCheckpoint(prefix=prefix, digest=digest, url=url):
            checkpoint = open_checkpoint(open_storage(url) if url else storage, prefix, digest=digest)
            if not is_loop and checkpoint.manifest.metadata.get(REGISTERED_STATE):
                raise CheckpointError(
                    f"step {checkpoint.step} was trained by a loop, whose registered state a Task does not continue. "
                    "Continue with that loop (train_fn=), or give the run another name, and begin from its weights "
                    "with RunConfig.start_from."
                )
            state = spec_of(checkpoint, live.cuts)
            live.carry(_constants_in(state))
            if place.number_of("build") < 2:
                refuse_drawn(job.task, live.inventory, build_seed, checkpoint.step, live.carried)
            added = _first_values(job, live.added_to(state))
            missing = added.keys()
            agree(first_value(name, tensor) for name, tensor in added.items())
            own = place.begin_own(store, spec_of(checkpoint, live.cuts, added))
            read = _read(checkpoint, own, place) if place.replica == 0 else 0
            received = _share(own, place, groups, probe)
            fill_initial(own, added)
            targets = {SNAPSHOT_BUFFER: own}
        case FromStart():
            first = first_build(job.task, job.batch.seed)
            drawn = drawn_first(job.task, first, live.inventory, build_seed)
            live.carry({path: (dtype_name(value.dtype), tuple(value.shape)) for path, value in drawn.items()})
            state = live.spec(with_optimizer=False)
            if job.initial_weights is None:
                targets = place.begin(store, state)
                agree(_draw(targets, first, drawn))
                received = read = 0
            else:
                own = place.begin_own(store, state)
                targets = {SNAPSHOT_BUFFER: own}
                agree(_draw(targets, first, drawn))
                given = initial_weights.find(job.initial_weights, state)
                read = initial_weights.read_into(own, given, lambda piece: place.speaks_for(_holders(piece, place)))
                received, missing = _share(own, place, groups, probe), given.missing
    for buffer in targets.values():
        buffer.complete = True
    if MIRROR_BUFFER not in targets:
        keeper.start(targets[SNAPSHOT_BUFFER])
        received += keeper.join()
    return Restored(
        own=targets[SNAPSHOT_BUFFER],
        bytes_received=received,
        bytes_read=read,
        added=frozenset(missing),
        given=given,
    )


def _plan(place: RankPosition, source: FromMemory) -> tuple[Plan, Target]:
    """The plan of a generation's members, with this worker's rows. Raises CheckpointError if bytes are missing."""
    target = Target.of(place.spec.members, place.mesh, mirrors=place.has_mirror)
    plan = make_plan(source.spec, source.copies, target, worker=place.worker)
    if isinstance(plan, Missing):
        raise CheckpointError(f"step {source.step} cannot be put together from memory: {plan}")
    return plan, target


@contextmanager
def moving_memory(place: RankPosition, job: Job, groups: Groups) -> Iterator[None]:
    """A context in which the members restore. Those that have no device and only `serve` are in a group with them.

    That group is separate: its end, as they are killed, ends nothing else.
    """
    if not place.spec.failed_devices:
        yield
        return
    groups.with_sources = more = Groups(use_gpu=False)
    try:
        if groups.aborted:
            raise CollectiveAborted("aborted before memory was handed over")
        _meet(more, place, job)
        yield
        more.state.barrier()
    finally:
        more.abort()
        keep_until_ended(more.close())
        groups.with_sources = None


def serve(
    spec: GenerationSpec, worker: WorkerId, job: Job, groups: Groups, store: ShardStore, *, is_loop: bool
) -> None:
    """Hand what this worker holds over to a generation that it is no member of: its device has failed, and is not used.

    Every member must restore meanwhile. `groups`: new ones. `is_loop`: there is a session's registered state, too.
    """
    place = RankPosition.of(spec, worker, job.engine)
    source, everyone = spec.source, position.with_sources(spec).members
    assert isinstance(source, FromMemory), source
    _meet(groups, place, job)
    if is_loop:
        _from_lowest(_registered(source, worker, store), groups.state, is_behind=store.is_behind(source.step))
    rebuild(source.rebuilds, source.step, source.spec, store, everyone, worker, groups)
    plan, _ = _plan(place, source)
    exchange(plan, source.copies, store, source.step, {}, everyone, worker, groups.state, lambda _: None)
    groups.state.barrier()


def _meet(groups: Groups, place: RankPosition, job: Job) -> None:
    spec = position.with_sources(place.spec)
    where = position.rendezvous_of(spec, place.worker, job, position.SOURCES_TIMEOUT_S)
    groups.connect_beside(replace(where, besides="/sources"))


def _in_bulk(groups: Groups) -> HostGroup:
    """The fastest way between all workers' host memory."""
    if groups.with_sources is not None:
        return groups.with_sources.state
    all_are_one_group = (groups.mesh.replicas, groups.mesh.tensor) == (1, 1)
    everyone = groups.everyone if groups.use_gpu and all_are_one_group else None
    return groups.state if everyone is None else DeviceExchange(groups.state, everyone)


def spec_of(
    checkpoint: Checkpoint, cuts: ParamLayout | None = None, added: Mapping[str, torch.Tensor] | None = None
) -> StateSpec:
    """The state's spec from a manifest, for workers of this layout, including the tensors in `added`."""
    tensors = {name: (info.dtype, tuple(info.shape)) for name, info in checkpoint.tensors.items()}
    more = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in (added or {}).items()}
    return state_spec(tensors | more, cuts)


def _first_values(job: Job, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Values of these parameters and buffers at the start of a run."""
    if not names:
        return {}
    found: dict[str, torch.Tensor] = {}
    for tensors in first_build(job.task, job.batch.seed).tensors():
        found |= {name: tensor.clone() for name, tensor in tensors.items() if name in names}
    return found


def _read(checkpoint: Checkpoint, own: ShardBuffer, place: RankPosition) -> int:
    """Fill the shard, except what another worker reads for this one; the bytes read from storage."""
    data = own.data.numpy()
    return checkpoint.read_many(
        (piece.tensor.name, piece.offsets, piece.sizes, data[piece.place])
        for piece in own.pieces.pieces(own.spec)
        if piece.tensor.name in checkpoint.tensors and place.speaks_for(_holders(piece, place))
    )


def _share(own: ShardBuffer, place: RankPosition, groups: Groups, probe: Callable[[str], None]) -> int:
    """Receive what others read for this worker; the bytes received."""
    if groups.world_size == 1:
        return 0
    probe("transfer")
    mesh = place.mesh
    parts: dict[Replication, list[torch.Tensor]] = {holders: [] for holders in Replication}
    for piece in own.pieces.pieces(own.spec):
        parts[_holders(piece, place)].append(own.data[piece.place])
    received = broadcast([part.numpy() for part in parts[Replication.EVERYONE]], groups.state)
    if place.replica == 0:
        received += pass_on(parts[Replication.TENSOR_GROUP], place.tensor_rank, mesh.tensor, 1, groups)
    return received + pass_on([own.data], place.replica, mesh.replicas, mesh.shards, groups)


def _holders(piece: Piece, place: RankPosition) -> Replication:
    """Workers that have the same piece, apart from other replicas."""
    if piece.tensor.replicated:
        return Replication.EVERYONE
    return Replication.TENSOR_GROUP if place.mesh.tensor > 1 and piece.tensor.tensor_dim is None else Replication.ONE


def _constants_in(state: StateSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Path -> dtype and shape of the constants that are part of a state."""
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in state.tensors}
    return {name.removeprefix(CONSTANT): kind for name, kind in found.items() if name.startswith(CONSTANT)}


def _draw(targets: dict[int, ShardBuffer], first: FirstBuild, constants: Mapping[str, torch.Tensor]) -> list[Item]:
    """Fill the buffers with the first state; the items that workers compare."""
    expected = {tensor.name for buffer in targets.values() for tensor in buffer.spec.tensors}
    drawn: list[Item] = []
    with torch.no_grad():
        for tensors in chain(({CONSTANT + path: value for path, value in constants.items()},), first.tensors()):
            for buffer in targets.values():
                fill_initial(buffer, tensors)
            drawn += (first_value(name, tensor) for name, tensor in tensors.items())
    if missing := sorted(expected - {item.name for item in drawn}):
        raise CheckpointError(
            f"{len(missing)} tensors got no initial values, first {missing[0]!r}; does build_model give the same model "
            "every time?"
        )
    if more := sorted({item.name for item in drawn} - expected):
        raise CheckpointError(
            f"the build that gives the first weights has {len(more)} tensors that the model has not, first {more[0]!r}"
            ": build_model gives another model each time. If it draws its layers at random, let it draw from a "
            "separate generator with a fixed seed."
        )
    return drawn


def hand_over(
    registered: RegisteredState, place: RankPosition, store: ShardStore, storage: Storage, groups: Groups
) -> None:
    """Bring a session's registered state to the step of the generation's source. Every member must call it.

    It comes from the lowest rank that holds buffers of that step, before these move: a worker with them has it, too.
    Ranks whose lines behind the step have run come first: those of others may have found the step undone, as the
    workers changed, and have set no mode.
    """
    source = place.spec.source
    match source:
        case FromStart():
            own: str | None = registered.first
        case FromCheckpoint(prefix=prefix, digest=digest, url=url):
            own = None
            if place.rank == 0:
                checkpoint = open_checkpoint(open_storage(url) if url else storage, prefix, digest=digest)
                own = str(checkpoint.manifest.metadata.get(REGISTERED_STATE, ""))
        case FromMemory():
            own = _registered(source, place.worker, store)
    if not isinstance(source, FromStart):
        group = (groups.with_sources or groups).state
        own = _from_lowest(own, group, is_behind=store.is_behind(source.step))
    if not own:
        raise CheckpointError(
            f"step {source.step} has no state of a session: it was trained with a Task. Continue with that task, or "
            "give the run another name, and begin from its weights with RunConfig.start_from."
        )
    store.register(source.step, own)
    registered.load(own, step=source.step)


def _registered(source: FromMemory, worker: WorkerId, store: ShardStore) -> str | None:
    """A session's state of the source's step, if this worker holds buffers of that source.

    A spare may have another state of a step of this number: from before the run went back, or one that nobody has
    compared.
    """
    rebuilt = {rebuild.layout_id for rebuild in source.rebuilds}
    ranks = [copy.holders for copy in source.copies if copy.layout_id not in rebuilt]
    ranks += [holders for rebuild in source.rebuilds for holders in (rebuild.holders, rebuild.keepers)]
    return store.registered(source.step) if any(worker in holders for holders in ranks) else None


def _from_lowest(own: str | None, group: HostGroup, *, is_behind: bool) -> str:
    """The text of the lowest rank that has one; of those with `is_behind`, if there are any."""
    data = (own or "").encode()
    place = 1 << 40 if own is None else group.rank + (0 if is_behind else group.size)
    is_first = -group.max_int(-place) == place and own is not None
    size = group.max_int(len(data) if is_first else 0)
    room = torch.zeros((size + 7) // 8 * 8, dtype=torch.uint8)
    if is_first:
        room[:size] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if size else room
    if not size:
        return ""
    return group.sum_int64(room.view(torch.int64)).view(torch.uint8)[:size].numpy().tobytes().decode()

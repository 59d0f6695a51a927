"""The exchange by a plan: every buffer filled, in bounded memory, with workers that come at any time."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch._C._distributed_c10d import HashStore

from raysharded.actors.comm.fsdp_collectives import finish_plainly
from raysharded.actors.comm.host_group import HostGroup
from raysharded.actors.shards import transfer
from raysharded.actors.shards.restore import _registered
from raysharded.actors.shards.store import HostMedium, ShardBuffer, ShardStore
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import (
    MIRROR_BUFFER,
    SNAPSHOT_BUFFER,
    Copy,
    Parity,
    Plan,
    Rebuild,
    StateSpec,
    Target,
    TensorSpec,
    make_plan,
    mirror_of,
)
from raysharded.protocol.messages import FromMemory
from tests.layout.test_planner import ids, memory_copies

TIMEOUT_S = 20.0
OLD, NEW = GenerationId(1), GenerationId(2)
STEP = 7
SPEC = StateSpec(
    tensors=(
        TensorSpec(name="w", dtype="float32", shape=(50, 9)),
        TensorSpec(name="v", dtype="bfloat16", shape=(7, 5)),
        TensorSpec(name="u", dtype="float32", shape=(3,)),
        TensorSpec(name="step", dtype="float32", shape=()),
    )
)
LINE = np.random.default_rng(0).integers(0, 256, SPEC.total_bytes, np.uint8)

T = TypeVar("T")


class Counted(HostGroup):
    """A worker's real gloo group, in a thread; counts what is at work at once."""

    def __init__(self, store: HashStore, rank: int, world_size: int) -> None:
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        super().__init__(dist.ProcessGroupGloo(store, rank, world_size, options), timeout, finish_plainly)
        self.waves: list[tuple[int, int]] = []
        """(bytes to send, bytes to receive)."""
        self._storages: dict[int, int] = {}

    @property
    def memory_bytes(self) -> int:
        """All memory that was handed to collectives."""
        return sum(self._storages.values())

    def exchange(self, received: torch.Tensor, send: torch.Tensor, out_sizes: list[int], in_sizes: list[int]) -> None:
        self.waves.append((len(send), len(received)))
        self._count(received, send)
        super().exchange(received, send, out_sizes, in_sizes)

    def broadcast(self, data: torch.Tensor) -> None:
        self.waves.append((len(data), len(data)))
        self._count(data)
        super().broadcast(data)

    def _count(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self._storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()


def in_threads(world_size: int, work: Callable[[Counted], T]) -> list[T]:
    """The results of a group's workers, by rank; a deadlock is an error after the time-out."""
    store = HashStore()
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(lambda r: work(Counted(store, r, world_size)), rank) for rank in range(world_size)]
        return [future.result(timeout=3 * TIMEOUT_S) for future in futures]


def filled(store: ShardStore, layout: GenerationId, medium: HostMedium, world_size: int, rank: int) -> ShardBuffer:
    """A complete buffer of the state whose line of bytes is `LINE`."""
    buffer = store.begin(STEP, layout, medium, world_size, rank, SPEC)
    for piece in buffer.pieces.pieces(SPEC):
        start = int(SPEC.base[SPEC.tensors.index(piece.tensor)])
        start += piece.offsets[0] * piece.tensor.row_bytes if piece.offsets else 0
        nbytes = piece.place.stop - piece.place.start
        buffer.data.numpy()[piece.place] = LINE[start : start + nbytes]
    buffer.complete = True
    return buffer


def reshard(
    members: Sequence[WorkerId], copies: Sequence[Copy], group: Counted
) -> tuple[Counted, int, int, frozenset[int]]:
    """One worker's part of a change of layout: (its group, bytes planned to come from others, those that came, the
    kinds of buffers that it keeps)."""
    worker, store = members[group.rank], ShardStore()
    for copy in copies:
        for rank in (rank for rank, holder in enumerate(copy.holders) if holder == worker):
            filled(store, OLD, "mirror" if copy.medium == "mirror" else "snapshot", copy.world_size, rank)
    target = Target(workers=tuple(members), mirrors=True)
    plan = make_plan(SPEC, copies, target, worker=worker)
    assert isinstance(plan, Plan)
    size = len(members)
    wanted = {SNAPSHOT_BUFFER: group.rank} | ({MIRROR_BUFFER: mirror_of(group.rank, size)} if size > 1 else {})
    kept = transfer.kept_buffers(plan, copies, target, store, STEP, worker)
    targets = {
        kind: store.share(kept[kind], NEW, "mirror" if kind else "snapshot", SPEC)
        if kind in kept
        else store.begin(STEP, NEW, "mirror" if kind else "snapshot", size, rank, SPEC)
        for kind, rank in wanted.items()
    }
    filled_by_plan = {kind: buffer for kind, buffer in targets.items() if kind not in kept}
    came = transfer.exchange(plan, copies, store, STEP, filled_by_plan, members, worker, group, lambda _: None)
    for kind, rank in wanted.items():
        expected, found = filled(ShardStore(), NEW, "snapshot", size, rank), targets[kind]
        for piece in expected.pieces.pieces(SPEC):
            assert found.data[piece.place].equal(expected.data[piece.place])
        assert (found.rank, found.world_size, found.layout) == (rank, size, NEW)
    return group, plan.receives(worker).total_bytes, came, frozenset(kept)


@settings(max_examples=10, deadline=None)
@given(st.data(), st.integers(1, 6), st.sampled_from([16, 64, 1000, 1 << 20]))
def test_every_buffer_is_filled_in_bounded_memory_and_nobody_waits_for_ever(
    data: st.DataObject, size: int, wave_bytes: int
) -> None:
    lost = data.draw(st.sets(st.integers(0, size - 1), max_size=1 if size > 2 else 0))
    survivors = [w for w in range(size) if w not in lost]
    members = ids(*data.draw(st.permutations([*survivors, *range(10, 10 + data.draw(st.integers(0, 2)))])))
    copies = tuple(replace(copy, layout_id=OLD) for copy in memory_copies(ids(*range(size)), sorted(lost)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "WAVE_BYTES", wave_bytes)
        done = in_threads(len(members), lambda group: reshard(members, copies, group))
    for group, planned, came, _ in done:
        assert came == planned == sum(received for _, received in group.waves)
        bound = max(wave_bytes, len(members) - 1)  # of each pair of workers a byte at least
        assert all(max(wave) <= bound for wave in group.waves)
        assert group.memory_bytes <= 2 * bound
    assert len({len(group.waves) for group, *_ in done}) == 1


@pytest.mark.parametrize(
    ("members", "kept"),
    [
        ((0, 10, 2, 3), [{0, 1}, set(), {0, 1}, {0, 1}]),
        ((0, 2, 10, 3), [{0, 1}, {0}, set(), {0, 1}]),
        ((0, 2, 3), [set(), set(), set()]),
    ],
)
def test_what_is_at_its_place_is_kept(members: tuple[int, ...], kept: list[set[int]]) -> None:
    """Worker 1 of four is lost: a replacement takes its place, another worker does, or there are three from now on."""
    copies = tuple(replace(copy, layout_id=OLD) for copy in memory_copies(ids(0, 1, 2, 3), [1]))
    done = in_threads(len(members), lambda group: reshard(ids(*members), copies, group))
    assert [set(found) for *_, found in done] == kept


def test_few_peers_need_few_waves() -> None:
    """A worker among many that receives data from one of them may use the whole of a wave for it."""
    members = ids(*range(6))
    copies = (Copy(medium="snapshot", world_size=6, holders=ids(1, 0, 2, 3, 4, 5), layout_id=OLD),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "WAVE_BYTES", 1 << 10)
        done = in_threads(6, lambda group: reshard(members, copies, group))
    most = max(planned for _, planned, *_ in done)
    assert most > 512
    for group, *_ in done:
        assert len(group.waves) <= 3 * most // 1024 + 1  # of three peers at most: of each a third of a wave


@pytest.mark.parametrize("wave_bytes", [1, 50, 1 << 20])
def test_what_one_has_for_all_goes_in_bounded_memory_too(wave_bytes: int) -> None:
    def work(group: Counted) -> tuple[bytes, int, Counted]:
        places = [np.full(size, group.rank, np.uint8) for size in (3, 0, 100, 17)]
        if group.rank == 0:
            places = [LINE[:3].copy(), LINE[:0].copy(), LINE[3:103].copy(), LINE[103:120].copy()]
        came = transfer.broadcast(places, group)
        return b"".join(place.tobytes() for place in places), came, group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "WAVE_BYTES", wave_bytes)
        done = in_threads(3, work)
    for rank, (got, came, group) in enumerate(done):
        assert got == LINE[:120].tobytes()
        assert came == (120 if rank else 0)
        assert group.memory_bytes <= wave_bytes


@pytest.mark.parametrize("num_threads", [1, 3])
def test_copies_within_a_worker_are_made_by_its_threads(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_COPY_BYTES", 100)
    names, copy = set[str](), np.copyto

    def noted(target: Any, source: Any) -> None:
        names.add(threading.current_thread().name)
        meeting.wait(60.0)  # all three at once
        copy(target, source)

    meeting = threading.Barrier(3)
    monkeypatch.setattr(np, "copyto", noted)
    whole = np.arange(875, dtype=np.uint16).view(np.uint8)
    targets = [np.zeros(1700, np.uint8), np.zeros(50, np.uint8), np.zeros(0, np.uint8)]
    sources = [whole[:1700], whole[1700:], whole[:0]]
    transfer.copy_bytes(list(zip(targets, sources, strict=True)), num_threads)
    assert np.array_equal(np.concatenate(targets), whole)
    assert len(names) == (3 if num_threads == 3 else 0)


def test_registered_state_comes_from_workers_that_hold_the_source() -> None:
    """A spare may have another text of a step of this number, and a worker that computes a lost buffer, too."""
    store = ShardStore()
    store.register(STEP, "text")
    copies = memory_copies(ids(0, 1))
    rebuild = Rebuild(
        layout_id=OLD,
        world_size=2,
        parity=Parity(k=1, m=1),
        holders=(WorkerId(0), None),
        keepers=(None, WorkerId(0)),
        lost=((1, WorkerId(1)),),
    )
    kept = FromMemory(step=STEP, spec=SPEC, copies=copies)
    rebuilt = replace(kept, copies=tuple(replace(copy, layout_id=OLD) for copy in copies), rebuilds=(rebuild,))
    found = [[_registered(source, WorkerId(one), store) for one in range(3)] for source in (kept, rebuilt)]
    assert found == [["text", "text", None], ["text", None, None]]

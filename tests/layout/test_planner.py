"""The planner: its plans are carried out on real buffers and compared with a model made of sets of bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.layout import (
    MIRROR_BUFFER,
    SNAPSHOT_BUFFER,
    STORAGE,
    Copy,
    Mesh,
    Missing,
    Plan,
    StateSpec,
    Target,
    TensorSpec,
    count_wire_bytes,
    has_mirrors,
    make_plan,
    mirror_of,
    order_workers,
    shard_map,
    tensor_specs,
)
from raysharded.testing.llama import LLAMA_7B
from tests.cases import examples
from tests.layout.test_balance import least_maximum_of_ring

MiB = 1 << 20


def ids(*numbers: int) -> tuple[WorkerId, ...]:
    return tuple(WorkerId(n) for n in numbers)


def spec_of(*shapes: tuple[int, ...], dtype: str = "float32") -> StateSpec:
    return StateSpec(tensors=tuple(TensorSpec(name=f"t{i}", dtype=dtype, shape=s) for i, s in enumerate(shapes)))


def memory_copies(
    workers: Sequence[WorkerId],
    lost: Sequence[int] = (),
    *,
    mirrors: bool = True,
    tensor: int = 1,
    apart: int = 1,
) -> tuple[Copy, ...]:
    """Snapshots and mirrors as a generation of these workers leaves them when the workers in `lost` have exited."""
    alive, size = [None if w in lost else w for w in workers], len(workers)
    snapshot = Copy(medium="snapshot", world_size=size, holders=tuple(alive), tensor=tensor)
    if not mirrors or size == 1:
        return (snapshot,)
    keeper = {mirror_of(rank, size, apart): alive[rank] for rank in range(size)}
    holders = tuple(keeper[rank] for rank in range(size))
    return snapshot, Copy(medium="mirror", world_size=size, holders=holders, tensor=tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    spec: StateSpec
    copies: tuple[Copy, ...]
    target: Target


@st.composite
def specs(draw: st.DrawFn) -> StateSpec:
    """With tensors that can be cut for tensor parallelism, of a degree of 1, 2 or 4, along any dimension."""
    tensors: list[TensorSpec] = []
    some_whole, some_cut = draw(st.booleans()), draw(st.booleans())
    for i in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(["float64", "bfloat16", "uint8"]))
        dim = draw(st.sampled_from([None, 0, 1, 2])) if some_cut else None
        if dim is None or dim == 0:
            shape = draw(st.one_of(st.just(()), st.tuples(st.integers(0, 20)), st.tuples(*[st.integers(0, 11)] * 2)))
            dim = dim if shape else None
        else:
            shape = tuple(draw(st.sampled_from([4, 8])) if d == dim else draw(st.integers(0, 7)) for d in range(3))
        replicated = some_whole and dim is None and draw(st.booleans())
        tensors += tensor_specs(f"t{i}", dtype, shape, replicated=replicated, tensor_dim=dim, strips=4)
    return StateSpec(tensors=tuple(tensors))


degrees = st.sampled_from([1, 1, 2, 4])


def aparts(num_workers: int) -> st.SearchStrategy[int]:
    return st.one_of(st.just(1), st.integers(1, max(1, num_workers - 1)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lost = draw(st.sets(st.integers(0, 12), max_size=4))
    copies: list[Copy] = []
    for _ in range(draw(st.integers(0, 2))):
        tensor = draw(degrees)
        members = draw(st.permutations(range(13)))[: tensor * draw(st.integers(1, 9 // tensor))]
        apart = draw(aparts(len(members)))
        copies += memory_copies(ids(*members), sorted(lost), mirrors=draw(st.booleans()), tensor=tensor, apart=apart)
    if draw(st.booleans()):
        tensor = draw(degrees)
        copies.append(Copy(medium="storage", world_size=tensor * draw(st.integers(1, 9 // tensor)), tensor=tensor))
    replicas, tensor = draw(st.sampled_from([1, 1, 2, 3])), draw(degrees)
    num_workers = replicas * tensor * draw(st.integers(1, max(1, 9 // replicas // tensor)))
    workers = draw(st.permutations([w for w in range(16) if w not in lost]))[:num_workers]
    target = Target(
        workers=ids(*workers),
        mirrors=draw(st.booleans()),
        replicas=replicas,
        tensor=tensor,
        apart=draw(aparts(num_workers // replicas)),
    )
    return Case(spec=draw(specs()), copies=tuple(copies), target=target)


def positions(spec: StateSpec, of: Copy | Mesh, rank: int) -> NDArray[np.int64]:
    """For every byte of a rank's buffer its place on the state's line, -1 for padding."""
    shard = shard_map(spec, of.shards if isinstance(of, Mesh) else of.world_size, rank, of.tensor)
    line = np.full(shard.size_bytes, -1, np.int64)
    for start, stop, offset in zip(shard.line_start, shard.line_stop, shard.offset, strict=True):
        line[offset : offset + stop - start] = np.arange(start, stop)
    return line


def bytes_in_memory(case: Case) -> dict[WorkerId, NDArray[np.bool_]]:
    """For every worker the bytes of the line that are in any of its buffers."""
    have: dict[WorkerId, NDArray[np.bool_]] = {}
    for copy in case.copies:
        for rank, holder in enumerate(copy.holders):
            if holder is not None:
                line = positions(case.spec, copy, rank)
                have.setdefault(holder, np.zeros(case.spec.total_bytes, np.bool_))[line[line >= 0]] = True
    return have


def needed(target: Target) -> dict[tuple[WorkerId, int], int]:
    """Per buffer of the target the shard whose bytes it shall have."""
    mesh = target.mesh
    buffers = {(worker, SNAPSHOT_BUFFER): mesh.shard_of(rank) for rank, worker in enumerate(target.workers)}
    if target.mirrors and has_mirrors(mesh):
        for rank, worker in enumerate(target.workers):
            buffers[worker, MIRROR_BUFFER] = mirror_of(rank, target.world_size, target.apart)
    return buffers


def carry_out(case: Case, plan: Plan) -> None:
    """Every buffer of the target gets its bytes, each written once, from a buffer that its source really has."""
    line = np.random.default_rng(0).integers(0, 256, case.spec.total_bytes, np.uint8)
    have = bytes_in_memory(case)
    anywhere = np.any([np.zeros(len(line), np.bool_), *have.values()], axis=0)
    wanted = {key: positions(case.spec, case.target.mesh, shard) for key, shard in needed(case.target).items()}
    written = {key: np.zeros(len(place), np.int64) for key, place in wanted.items()}
    got = {key: np.zeros(len(place), np.uint8) for key, place in wanted.items()}
    for i in range(len(plan)):
        copy, rank, source = case.copies[plan.copy[i]], int(plan.src_rank[i]), int(plan.src_worker[i])
        assert source == (STORAGE if copy.medium == "storage" else copy.holders[rank])
        receiver = WorkerId(int(plan.dst_worker[i]))
        assert case.target.workers[plan.dst_rank[i]] == receiver
        key = (receiver, int(plan.dst_kind[i]))
        at = slice(int(plan.dst_offset[i]), int(plan.dst_offset[i] + plan.nbytes[i]))
        held = positions(case.spec, copy, rank)
        place = held[plan.src_offset[i] : plan.src_offset[i] + plan.nbytes[i]]
        assert place[0] == plan.line_start[i]
        got[key][at] = line[place]
        written[key][at] += 1
        if source != receiver and receiver in have:
            assert not have[receiver][place].any(), "the receiver had it"
        if source == STORAGE:
            assert not anywhere[place].any(), "it was in memory"
    for key, place in wanted.items():
        assert np.array_equal(written[key], place >= 0)
        assert np.array_equal(got[key][place >= 0], line[place[place >= 0]])


def columns(plan: Plan) -> list[list[int]]:
    return [getattr(plan, name).tolist() for name in Plan.__dataclass_fields__]


@settings(max_examples=examples(40, of=120), deadline=None)
@given(cases())
def test_a_plan_rebuilds_the_state_or_names_exactly_what_is_missing(case: Case) -> None:
    plan = make_plan(case.spec, case.copies, case.target)
    stored = any(copy.medium == "storage" for copy in case.copies)
    held = np.any([np.full(case.spec.total_bytes, stored), *bytes_in_memory(case).values()], axis=0)
    if isinstance(plan, Plan):
        assert held.all()
        carry_out(case, plan)
        return
    assert plan.total_bytes == np.count_nonzero(~held) > 0
    rows: list[tuple[str, int]] = []
    for name, strips in itertools.groupby(range(len(case.spec.tensors)), lambda t: case.spec.tensors[t].name):
        gone: set[int] = set()
        for t in strips:
            tensor, base = case.spec.tensors[t], int(case.spec.base[t])
            of_strip = ~held[base : base + tensor.nbytes].reshape(tensor.rows, tensor.row_bytes)
            gone |= set(np.flatnonzero(of_strip.any(axis=1)).tolist())
        rows += [(name, row) for row in sorted(gone)]
    named = [(name, row) for name, start, stop in plan.ranges for row in range(start, stop)]
    assert named == rows[: len(named)]
    assert len(named) == len(rows) or len(plan.ranges) == 8


@settings(max_examples=examples(20, of=60), deadline=None)
@given(cases())
def test_sender_and_receiver_see_the_same_rows_in_the_same_order(case: Case) -> None:
    plan = make_plan(case.spec, case.copies, case.target)
    if isinstance(plan, Missing):
        return
    everyone = sorted({*plan.src_worker.tolist(), *plan.dst_worker.tolist()} - {STORAGE})
    rows = 0
    for a in everyone:
        sends = plan.sends(WorkerId(a))
        assert sends.dst_worker.tolist() == sorted(sends.dst_worker.tolist())
        rows += len(sends) + len(plan.local(WorkerId(a))) + len(plan.reads(WorkerId(a)))
        for b in everyone:
            receives = plan.receives(WorkerId(b))
            there = sends.take(np.flatnonzero(sends.dst_worker == b))
            here = receives.take(np.flatnonzero(receives.src_worker == a))
            assert columns(there) == columns(here)
    assert rows == len(plan)


@settings(max_examples=examples(20, of=60), deadline=None)
@given(cases(), st.sets(st.integers(0, 15), min_size=3, max_size=3))
def test_a_workers_own_plan_is_its_part_of_the_whole(case: Case, workers: set[int]) -> None:
    plan = make_plan(case.spec, case.copies, case.target)
    for worker in ids(*workers):
        own = make_plan(case.spec, case.copies, case.target, worker=worker)
        if isinstance(plan, Missing) or isinstance(own, Missing):
            assert own == plan
        else:
            mine = np.flatnonzero((plan.src_worker == worker) | (plan.dst_worker == worker))
            assert columns(own) == columns(plan.take(mine))


@settings(max_examples=examples(20, of=60), deadline=None)
@given(cases())
def test_the_count_of_wire_bytes_is_the_plans(case: Case) -> None:
    plan = make_plan(case.spec, case.copies, case.target)
    if isinstance(plan, Plan):
        assert count_wire_bytes(case.spec, case.copies, case.target) == plan.wire_bytes


@settings(max_examples=examples(33, of=100), deadline=None)
@given(cases())
def test_each_worker_gets_what_it_has_not_and_no_more(case: Case) -> None:
    """The lower bound for a target: the bytes of a worker's buffers that are in memory, but not in its own."""
    plan = make_plan(case.spec, case.copies, case.target)
    if isinstance(plan, Missing):
        return
    nothing = np.zeros(case.spec.total_bytes, np.bool_)
    have = bytes_in_memory(case)
    anywhere = np.any([nothing, *have.values()], axis=0)
    least: dict[WorkerId, int] = {}
    for (worker, _), shard in needed(case.target).items():
        line = positions(case.spec, case.target.mesh, shard)
        there = line[line >= 0]
        lacking = anywhere[there] & ~have.get(worker, nothing)[there]
        least[worker] = least.get(worker, 0) + int(lacking.sum())
    assert {worker: plan.receives(worker).total_bytes for worker in least} == least
    assert plan.wire_bytes == sum(least.values())


@settings(max_examples=examples(20, of=60), deadline=None)
@given(cases())
def test_neighbours_that_are_contiguous_on_both_sides_are_one_row(case: Case) -> None:
    plan = make_plan(case.spec, case.copies, case.target)
    if isinstance(plan, Missing):
        return
    rows = list(zip(*columns(plan), strict=True))
    names = list(Plan.__dataclass_fields__)
    for row, following in itertools.pairwise(rows):
        a, b = dict(zip(names, row, strict=True)), dict(zip(names, following, strict=True))
        same = all(a[n] == b[n] for n in ("src_worker", "copy", "src_rank", "dst_worker", "dst_kind"))
        assert not (
            same
            and a["src_offset"] + a["nbytes"] == b["src_offset"]
            and a["dst_offset"] + a["nbytes"] == b["dst_offset"]
        )


@pytest.mark.parametrize("mirrors", [True, False])
def test_pieces_large_enough_to_be_split_between_senders_arrive_whole(mirrors: bool) -> None:
    spec = spec_of((1024, 257), (7, 30_000), (3,), (), (1024, 257))
    for lost, workers in (((), (9, 8, 7)), ((1,), (0, 2, 3, 9)), ((2,), (3, 1, 0))):
        case = Case(
            spec=spec,
            copies=memory_copies(ids(0, 1, 2, 3), lost),
            target=Target(workers=ids(*workers), mirrors=mirrors),
        )
        plan = make_plan(spec, case.copies, case.target)
        assert isinstance(plan, Plan)
        carry_out(case, plan)


def test_nothing_moves_when_nothing_changes() -> None:
    workers = ids(*range(5))
    plan = make_plan(spec_of((64, 16), (16, 16)), memory_copies(workers), Target(workers=workers, mirrors=True))
    assert isinstance(plan, Plan)
    assert plan.wire_bytes == plan.bytes_from_storage == 0
    assert plan.total_bytes == 2 * 4 * (64 * 16 + 16 * 16)


def test_a_replacement_takes_no_more_than_its_own_two_buffers() -> None:
    spec = spec_of((64, 16), (16, 16))
    plan = make_plan(spec, memory_copies(ids(0, 1, 2, 3), (2,)), Target(workers=ids(0, 1, 9, 3), mirrors=True))
    assert isinstance(plan, Plan)
    assert plan.wire_bytes == 2 * spec.total_bytes // 4
    assert plan.receives(WorkerId(9)).total_bytes == plan.wire_bytes


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("mirrors", [True, False])
def test_a_spare_in_the_lost_place_receives_its_shard_from_the_mirror_and_survivors_receive_nothing(
    size: int, mirrors: bool
) -> None:
    lost, spare = size // 2, WorkerId(99)
    members = tuple(spare if worker == lost else worker for worker in ids(*range(size)))
    case = Case(
        spec=spec_of((64, 16), (7, 3), (16, 16)),
        copies=memory_copies(ids(*range(size)), (lost,)),
        target=Target(workers=members, mirrors=mirrors),
    )
    plan = make_plan(case.spec, case.copies, case.target)
    assert isinstance(plan, Plan)
    carry_out(case, plan)
    received = plan.receives(spare)
    assert plan.wire_bytes == received.total_bytes > 0
    sources = {
        (kind, case.copies[copy].medium, rank, worker)
        for kind, copy, rank, worker in zip(
            *(getattr(received, name).tolist() for name in ("dst_kind", "copy", "src_rank", "src_worker")), strict=True
        )
    }
    its_mirror = mirror_of(lost, size)
    expected = {(SNAPSHOT_BUFFER, "mirror", lost, (lost + 1) % size)}
    expected |= {(MIRROR_BUFFER, "snapshot", its_mirror, its_mirror)} if mirrors else set()
    assert sources == expected


def sent(plan: Plan, workers: Sequence[int]) -> list[int]:
    return [plan.sends(WorkerId(w)).total_bytes for w in workers]


@pytest.mark.parametrize(
    "shapes",
    [[(4096, 1024)], [(1024, 1024)] * 12, [(8192, 512), (2048, 1024), (2048, 1024), (512,)]],
    ids=["one tensor", "equal tensors", "a large one among small ones"],
)
def test_senders_share_the_load_when_all_receivers_are_new(shapes: list[tuple[int, ...]]) -> None:
    spec = spec_of(*shapes)
    plan = make_plan(spec, memory_copies(ids(0, 1, 2, 3)), Target(workers=ids(4, 5, 6), mirrors=True))
    assert isinstance(plan, Plan)
    load = sent(plan, range(4))
    assert sum(load) == 2 * spec.total_bytes
    assert max(load) <= 1.1 * sum(load) / 4


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2), (4, 2), (2, 4)])
def test_senders_share_the_load_between_tensor_parallel_degrees(before: int, after: int) -> None:
    """Bytes that tensor ranks have in common are sent by all of them."""
    spec = StateSpec(
        tensors=(
            *tensor_specs("q", "float32", (1024, 512), tensor_dim=0),
            *tensor_specs("o", "float32", (512, 1024), tensor_dim=1, strips=8),
            *tensor_specs("norm", "float32", (2048, 512)),
        )
    )
    copies = memory_copies(ids(*range(8)), tensor=before, apart=4)
    target = Target(workers=ids(*range(8, 16)), mirrors=True, tensor=after, apart=4)
    plan = make_plan(spec, copies, target)
    assert isinstance(plan, Plan)
    load = sent(plan, range(8))
    common = spec.tensors[-1].nbytes
    assert sum(load) == 2 * (spec.total_bytes - common) + 2 * common * after
    assert max(load) <= 1.1 * sum(load) / 8


def test_a_degree_that_some_tensor_cannot_have_is_refused() -> None:
    spec = StateSpec(tensors=tensor_specs("o", "float32", (8, 6), tensor_dim=1, strips=2))
    copies, workers = memory_copies(ids(0, 1, 2), tensor=1), ids(0, 1, 2)
    with pytest.raises(ConfigError, match=r"'o'.*possible: 1, 2"):
        make_plan(spec, copies, Target(workers=workers, mirrors=False, tensor=3))
    with pytest.raises(ConfigError, match="multiple"):
        Target(workers=workers, mirrors=False, tensor=2)
    with pytest.raises(ConfigError, match="cannot mirror itself"):
        Target(workers=workers, mirrors=True, apart=3)


def test_the_neighbours_of_a_lost_worker_do_not_send_much_more_than_others() -> None:
    """Worker 3's bytes are with 4 alone; 4's own bytes then come from its mirror at 5, and so on round the ring."""
    spec = spec_of(*[(1024, 512)] * 16)
    plan = make_plan(spec, memory_copies(ids(*range(8)), (3,)), Target(workers=ids(*range(10, 18)), mirrors=False))
    assert isinstance(plan, Plan)
    load = sent(plan, [0, 1, 2, 4, 5, 6, 7])
    assert max(load) <= 1.1 * sum(load) / len(load)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="each once"):
        Target(workers=ids(1, 1), mirrors=True)
    with pytest.raises(ConfigError, match="2 holders for 3 ranks"):
        Copy(medium="snapshot", world_size=3, holders=ids(0, 1))
    with pytest.raises(ConfigError, match="0 or more"):
        Target(workers=ids(0, -1), mirrors=True)
    with pytest.raises(ConfigError, match="no mirror"):
        mirror_of(0, 1)


def test_the_mirrors_of_all_ranks_are_a_permutation_without_fixed_points() -> None:
    for world_size in range(2, 10):
        mirrored = [mirror_of(rank, world_size) for rank in range(world_size)]
        assert sorted(mirrored) == list(range(world_size))
        assert all(m != rank for rank, m in enumerate(mirrored))


@pytest.fixture(scope="module")
def large() -> tuple[Case, Plan]:
    """A plan of millions of rows: a 7B model with Adam, 1024 workers of which 8 are lost, in the order that is best."""
    lost = range(60, 1024, 128)
    spec, copies = LLAMA_7B.state, memory_copies(ids(*range(1024)), lost)
    survivors = ids(*(w for w in range(1024) if w not in lost))
    target = Target(workers=order_workers(spec, copies, survivors, (), True), mirrors=True)
    plan = make_plan(spec, copies, target)
    assert isinstance(plan, Plan)
    return Case(spec=spec, copies=copies, target=target), plan


def test_a_7b_model_from_1024_to_1016_workers_is_planned_in_bulk(large: tuple[Case, Plan]) -> None:
    """No time is asserted: only that a plan of millions of rows comes from arrays (it would take minutes otherwise)."""
    case, plan = large
    assert len(plan) > 2_000_000
    steps = case.spec.nbytes[case.spec.replicated].sum()
    assert plan.total_bytes == 2 * (case.spec.total_bytes - steps) + 2 * 1016 * steps
    assert plan.bytes_from_storage == 0
    assert count_wire_bytes(case.spec, case.copies, case.target) == plan.wire_bytes
    received = np.bincount(plan.dst_worker, np.where(plan.src_worker != plan.dst_worker, plan.nbytes, 0))
    largest = max(shard_map(case.spec, 1016, rank).size_bytes for rank in range(0, 1016, 100))
    assert received.mean() < largest  # of two buffers of that size


def test_senders_of_a_large_model_have_at_most_a_tenth_more_than_they_must(large: tuple[Case, Plan]) -> None:
    case, plan = large
    remote = plan.src_worker != plan.dst_worker
    lost = {rank for rank, holder in enumerate(case.copies[0].holders) if holder is None}
    wanted = np.bincount(plan.src_rank[remote], plan.nbytes[remote], 1024).astype(np.int64)  # by who had it first
    load = np.bincount(plan.src_worker[remote], plan.nbytes[remote])
    assert load.max() <= 1.1 * least_maximum_of_ring(wanted, lost)


def test_workers_of_a_large_model_plan_their_own_rows(large: tuple[Case, Plan]) -> None:
    case, plan = large
    for worker in case.target.workers[::300]:
        own = make_plan(case.spec, case.copies, case.target, worker=worker)
        assert isinstance(own, Plan)
        mine = np.flatnonzero((plan.src_worker == worker) | (plan.dst_worker == worker))
        assert columns(own) == columns(plan.take(mine))
        assert len(own) < 20_000

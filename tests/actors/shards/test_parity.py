"""Parity blocks between workers: computed, and lost shards computed from them, with threads as workers; and runs."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raysharded as rs
from raysharded.actors.comm.abortable_wait import run_or_leave
from raysharded.actors.shards import block_gather
from raysharded.actors.shards.parity import ParityKeeper
from raysharded.actors.shards.position import RankPosition
from raysharded.actors.shards.rebuild import rebuild
from raysharded.actors.shards.store import ShardStore
from raysharded.data.order import positions_of_step, sample_ids
from raysharded.demo.model import ByteGPT
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Parity, Recoverable, StateSpec, TensorSpec, block_bytes, recoverable, shard_map
from raysharded.protocol.messages import FromStart, GenerationSpec
from raysharded.testing import Fault, FaultPlan
from tests.training.harness import Collector, Outcome, SmallTask, Tokens, make_driver, make_job, make_limits, train

LAYOUT, STEP = GenerationId(3), 8
SPEC = StateSpec(
    tensors=(
        TensorSpec(name="a", dtype="float32", shape=(31, 5)),
        TensorSpec(name="b", dtype="uint8", shape=(3, 7)),  # some ranks have none of it
        TensorSpec(name="c", dtype="float32", shape=()),
    )
)


class Wire:
    """A `state` group of threads: send and recv of host tensors, each message by (from, to, tag)."""

    def __init__(self) -> None:
        self._messages: dict[tuple[int, int, int], queue.Queue[torch.Tensor]] = {}

    def messages(self, source: int, target: int, tag: int) -> queue.Queue[torch.Tensor]:
        return self._messages.setdefault((source, target, tag), queue.Queue())


class Work:
    def __init__(self, wait: Any) -> None:
        self.wait = wait


class WireGroups:
    """The part of `Groups` that parity uses."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank
        self.state = self
        self.aborted = False

    def deliver(self, message: Work) -> None:
        message.wait()

    def beside(self, do: Callable[[], int], name: str) -> int:
        return run_or_leave(do, lambda: self.aborted, name)

    def send(self, data: torch.Tensor, peer: int, tag: int) -> Work:
        self._wire.messages(self._rank, peer, tag).put(data.clone())
        return Work(lambda: None)

    def recv(self, data: torch.Tensor, peer: int, tag: int) -> Work:
        def wait() -> None:
            sent = self._wire.messages(peer, self._rank, tag).get(timeout=10)
            assert sent.shape == data.shape
            data.copy_(sent)

        return Work(wait)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_gather, "PIECE_BYTES", 48)


def place_of(world: int, rank: int, parity: Parity) -> RankPosition:
    spec = GenerationSpec(
        generation=LAYOUT,
        members=tuple(WorkerId(w) for w in range(world)),
        source=FromStart(),
        host="",
        port=0,
        prefix="",
    )
    return RankPosition(spec=spec, worker=WorkerId(rank), mirrors=True, parity=parity)


def protected(world: int, parity: Parity) -> list[ShardStore]:
    """Workers that hold random snapshots of two steps and have made their parity blocks, by rank."""
    stores, wire = [ShardStore() for _ in range(world)], Wire()

    def one(rank: int) -> None:
        place, store = place_of(world, rank, parity), stores[rank]
        assert place.has_parity
        assert not place.has_mirror
        keeper = ParityKeeper(place, parity, WireGroups(wire, rank), store)  # type: ignore[arg-type]  # what it uses
        for step in range(STEP - 2, STEP + 1):
            own = place.begin_snapshot(store, step, SPEC)
            own.data[:] = torch.from_numpy(np.random.default_rng([rank, step]).integers(0, 256, own.data.numel()))
            own.complete = True
            keeper.start(own)
            assert keeper.join() > 0
            assert not own.is_read

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(one, range(world)))
    return stores


def rebuilt(stores: list[ShardStore], left: list[int]) -> Recoverable:
    """Carry out the rebuilds with those that are left."""
    found = recoverable(SPEC, [held for rank in left for held in stores[rank].held(WorkerId(rank))])
    assert found is not None
    members, wire = [WorkerId(rank) for rank in left], Wire()

    def one(new_rank: int) -> None:
        groups: Any = WireGroups(wire, new_rank)
        store, worker = stores[left[new_rank]], members[new_rank]
        rebuild(found.rebuilds, found.step, SPEC, store, members, worker, groups)

    with ThreadPoolExecutor(len(left)) as pool:
        list(pool.map(one, range(len(left))))
    return found


def check_copies(stores: list[ShardStore], found: Recoverable) -> None:
    """Assert that each holder really holds the buffer, with the bytes of its rank."""
    for copy in found.copies:
        for rank, holder in enumerate(copy.holders):
            if holder is not None:
                buffer = stores[holder].find(found.step, LAYOUT, copy.medium, rank)
                original = stores[rank].find(found.step, LAYOUT, "snapshot")
                assert torch.equal(buffer.data, original.data)


@pytest.mark.parametrize(
    ("world", "parity"),
    [(5, Parity(k=4, m=1)), (7, Parity(k=4, m=1)), (3, Parity(k=2, m=1)), (2, Parity(k=1, m=1))],
    ids=str,
)
def test_every_single_loss_is_computed_back_to_the_bit(world: int, parity: Parity) -> None:
    for lost in range(world):
        stores = protected(world, parity)
        found = rebuilt(stores, [rank for rank in range(world) if rank != lost])
        assert found.step == STEP
        assert [rank for each in found.rebuilds for rank, _ in each.lost] == [lost]
        check_copies(stores, found)


@pytest.mark.parametrize(("world", "parity"), [(6, Parity(k=4, m=2)), (8, Parity(k=3, m=3))], ids=str)
def test_every_m_losses_at_once_are_computed_back_to_the_bit(world: int, parity: Parity) -> None:
    pytest.importorskip("zfec", reason="raysharded[parity]")
    for lost in [*combinations(range(world), parity.m)][:: 1 if parity.m == 2 else 5]:
        stores = protected(world, parity)
        found = rebuilt(stores, [rank for rank in range(world) if rank not in lost])
        assert found.step == STEP
        assert {rank for each in found.rebuilds for rank, _ in each.lost} == set(lost)
        check_copies(stores, found)


def test_a_loss_while_a_lost_shard_was_given_back_is_computed_back_too() -> None:
    world, parity = 7, Parity(k=4, m=1)
    stores = protected(world, parity)
    first = rebuilt(stores, [rank for rank in range(world) if rank != 2])
    (at,) = [worker for each in first.rebuilds for _, worker in each.lost]
    left = [rank for rank in range(world) if rank not in (2, 4)]  # 4 shares stripes with 2, which kept parity of none
    assert at in left
    found = rebuilt(stores, left)
    assert found.step == STEP
    assert [rank for each in found.rebuilds for rank, _ in each.lost] == [4]
    check_copies(stores, found)


def test_the_blocks_of_two_steps_are_kept_and_no_more() -> None:
    world, parity = 6, Parity(k=4, m=1)
    length = block_bytes(SPEC, world, parity)
    snapshots = [shard_map(SPEC, world, rank).size_bytes for rank in range(world)]
    stores = protected(world, parity)
    assert [store.size_bytes for store in stores] == [2 * (size + parity.m * length) for size in snapshots]
    for store in stores:
        steps = [held.step for held in store.held(WorkerId(0)) if held.medium == "parity"]
        assert steps == [STEP - 1, STEP]  # the last committed one stays


@pytest.mark.parametrize("parity", [Parity(k=4, m=1), Parity(k=4, m=2)], ids=str)
def test_blocks_take_m_kths_of_the_memory_of_the_snapshots(parity: Parity) -> None:
    with torch.device("meta"):
        model = ByteGPT(layers=6, width=256, heads=4, seq_len=128, dropout=0.1).build_model()
    assert 4e6 < sum(param.numel() for param in model.parameters()) < 6e6
    spec = StateSpec(
        tensors=tuple(
            TensorSpec(name=f"{kind}.{name}", dtype="float32", shape=tuple(param.shape))
            for name, param in model.named_parameters()
            for kind in ("model", "exp_avg", "exp_avg_sq")
        )
    )
    for world in (parity.width, 7, 8, 13, 16):
        snapshots = sum(shard_map(spec, world, rank).size_bytes for rank in range(world))
        blocks = world * parity.m * block_bytes(spec, world, parity)
        assert blocks == pytest.approx(parity.m / parity.k * snapshots, rel=0.05), world


# -- runs --

ONE = rs.EngineConfig(redundancy=rs.Redundancy(parity=(2, 1)))
TWO = rs.EngineConfig(redundancy=rs.Redundancy(parity=(2, 2)))
STEPS, MICROBATCHES = 4, 4
_alone: list[Outcome] = []


def check(outcome: Outcome) -> None:
    """Assert that it gave the bits of one worker alone."""
    if not _alone:
        _alone.append(train(1, task=SmallTask(), microbatches=MICROBATCHES, steps=STEPS))
    assert outcome.bits == _alone[0].bits


def generations(outcome: Outcome) -> list[tuple[int, str]]:
    """(workers, redundancy) of each generation."""
    return [(len(g["members"]), g["redundancy"]) for g in outcome.of("generation")]


def recoveries(outcome: Outcome) -> list[tuple[str, int]]:
    """(source, step) of every generation that does not have all members of the one before."""
    return [
        (after["source"], after["step"])
        for before, after in pairwise(outcome.of("generation"))
        if set(before["members"]) - set(after["members"])
    ]


def without_replacements(workers: int, losses: int) -> dict[WorkerId, Callable[[], None]]:
    """Workers that are started in the place of lost ones do not come before the run's end."""
    return {WorkerId(worker): partial(time.sleep, 600.0) for worker in range(workers, workers + losses)}


@pytest.mark.procs
@pytest.mark.slow
def test_one_loss_after_the_other_costs_no_committed_step_also_where_mirrors_take_the_place_of_parity() -> None:
    kills = [(2, 2, "forward"), (0, 2, "agree"), (3, 3, "snapshot")]  # the second in the first step after a recovery
    late = without_replacements(4, len(kills))
    outcome = train(4, task=SmallTask(), microbatches=MICROBATCHES, steps=STEPS, engine=ONE, kills=kills, prepare=late)
    check(outcome)
    parity = "parity (2, 1)"
    assert generations(outcome)[:3] == [(4, parity), (3, parity), (2, f"mirrors: {parity} needs 3 workers")]
    assert recoveries(outcome) == [("memory", 1), ("memory", 1), ("memory", 2)]  # the agreement of 3 committed 2


@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.long
def test_one_loss_after_the_other_costs_no_committed_step_of_five_workers() -> None:
    kills = [(2, 1, "forward"), (0, 1, "agree"), (4, 3, "snapshot")]
    late = without_replacements(5, len(kills))
    outcome = train(5, task=SmallTask(), microbatches=MICROBATCHES, steps=STEPS, engine=ONE, kills=kills, prepare=late)
    check(outcome)
    parity = "parity (2, 1)"
    assert generations(outcome)[:3] == [(5, parity), (4, parity), (3, parity)]
    assert recoveries(outcome) == [("memory", 0), ("memory", 0), ("memory", 2)]


@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.long
def test_two_losses_at_once_or_one_during_the_recovery_of_another_cost_no_committed_step() -> None:
    pytest.importorskip("zfec", reason="raysharded[parity]")
    kills = [(1, 2, "apply"), (5, 2, "transfer"), (3, 3, "agree"), (4, 3, "agree")]
    late = without_replacements(6, len(kills))
    outcome = train(6, task=SmallTask(), microbatches=MICROBATCHES, steps=STEPS, engine=TWO, kills=kills, prepare=late)
    check(outcome)
    parity = "parity (2, 2)"
    assert generations(outcome)[:3] == [(6, parity), (5, parity), (4, parity)]
    assert recoveries(outcome)[:2] == [("memory", 1), ("memory", 1)]
    assert set(recoveries(outcome)[2:]) <= {("memory", 1), ("memory", 2)}  # the agreement of 3 commits 2


class Paced(Tokens):
    """No sample of step 3 is read before there is a file."""

    def __init__(self, may_go_on: Path) -> None:
        super().__init__()
        self._may_go_on = may_go_on
        self._held = set(sample_ids(5, positions_of_step(3, 2 * MICROBATCHES), len(self)).tolist())

    def __getitem__(self, index: int) -> Any:
        deadline = time.monotonic() + 60.0
        while index in self._held and not self._may_go_on.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return super().__getitem__(index)


@pytest.mark.procs
@pytest.mark.slow
def test_more_losses_than_parity_covers_go_back_to_a_checkpoint_which_is_protected_at_once(tmp_path: Path) -> None:
    kills = [Fault(worker=WorkerId(worker), step=3, phase="apply") for worker in (1, 2)]
    plan, may_go_on = FaultPlan(faults=tuple(kills), folder=str(tmp_path)), tmp_path / "may go on"

    class Listening(Collector):
        def __call__(self, kind: str, fields: dict[str, Any]) -> None:
            super().__call__(kind, fields)
            if kind == "checkpoint":
                may_go_on.touch()

    job = make_job(
        f"{tmp_path}/run",
        task=SmallTask(),
        data=Paced(may_go_on),
        microbatches=MICROBATCHES,
        steps=STEPS,
        engine=replace(ONE, prefetch=False),  # samples of step 3 would be read ahead, and the reader waits there
        save_every=2,
        faults=plan,
    )
    listener = Listening()
    limits = make_limits(job, 5, min_workers=1, max_worker_losses=2, join_wait_s=60.0)
    state = make_driver(job, limits, listener).run()
    assert all(plan.fired(kill) for kill in kills)
    numbers = tuple(listener.numbers[step] for step in range(1, STEPS + 1))
    outcome = Outcome(numbers=numbers, fingerprint=state.result_fingerprint, entries=tuple(listener.entries))
    check(outcome)
    parity = "parity (2, 1)"
    assert generations(outcome)[:2] == [(5, parity), (3, parity)]
    assert recoveries(outcome) == [("checkpoint", 2)]

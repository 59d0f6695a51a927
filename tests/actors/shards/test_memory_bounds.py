"""A worker's memory is bounded, and as documented."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from raysharded.actors.numerics.microbatch_schedule import Schedule
from raysharded.actors.reduction.tree_reducer import ReductionState, TreeReducer
from raysharded.actors.shards.store import ShardStore
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Mesh, StateSpec, TensorSpec, mirror_of, shard_map
from tests.actors.fake_group import fake_mesh

LAYOUT = GenerationId(3)


def spec(with_optimizer: bool) -> StateSpec:
    tensors = [TensorSpec(name="model.w", dtype="float32", shape=(10, 3))]
    if with_optimizer:
        tensors.append(TensorSpec(name="optim.w.exp_avg", dtype="float32", shape=(10, 3)))
        tensors.append(TensorSpec(name="optim.w.step", dtype="float32", shape=()))
    return StateSpec(tensors=tuple(tensors))


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_host_memory_is_two_snapshots_and_two_mirrors_of_the_local_state(world_size: int) -> None:
    before, after = spec(with_optimizer=False), spec(with_optimizer=True)
    for rank in range(world_size):
        store = ShardStore()
        peer = mirror_of(rank, world_size)
        for step in range(8):
            state = after if step else before  # the optimizer's state appears with the first step
            for medium, whose in (("snapshot", rank), ("mirror", peer)):
                buffer = store.begin(step, LAYOUT, medium, world_size, whose, state)  # type: ignore[arg-type]  # literals
                buffer.complete = True
            shares = shard_map(after, world_size, rank).size_bytes + shard_map(after, world_size, peer).size_bytes
            assert store.size_bytes <= 2 * shares
        assert store.size_bytes == 2 * shares


def test_the_last_committed_step_stays_while_the_next_one_is_filled() -> None:
    store, state = ShardStore(), spec(with_optimizer=True)
    for step in range(1, 6):
        buffer = store.begin(step, LAYOUT, "snapshot", 2, 0, state)
        if step > 1:
            assert store.find(step - 1, LAYOUT, "snapshot").complete
        with pytest.raises(KeyError, match=f"no snapshot of step {step} in layout 3"):
            store.find(step, LAYOUT, "snapshot")
        buffer.complete = True
    assert [held.step for held in store.held(WorkerId(9))] == [4, 5]


def test_an_interrupted_step_does_not_cost_a_complete_one() -> None:
    store, state = ShardStore(), spec(with_optimizer=True)
    for step in (1, 2):
        store.begin(step, LAYOUT, "mirror", 2, 1, state).complete = True
    store.begin(3, LAYOUT, "mirror", 2, 1, state)  # never completed
    again = store.begin(3, LAYOUT, "mirror", 2, 1, state)
    again.complete = True
    assert store.find(2, LAYOUT, "mirror").complete
    assert store.find(3, LAYOUT, "mirror") is again


def test_older_layouts_stay_until_they_are_dropped() -> None:
    store, state = ShardStore(), spec(with_optimizer=True)
    for layout in (GenerationId(1), GenerationId(2)):
        store.begin(4, layout, "snapshot", 2, 0, state).complete = True
    assert store.find(4, GenerationId(1), "snapshot").complete
    assert store.newest_own() is store.find(4, GenerationId(2), "snapshot")
    store.drop_other_layouts(GenerationId(2))
    assert [held.layout_id for held in store.held(WorkerId(0))] == [2]


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [1, 8, 13])
def test_sharded_accumulation_carries_few_sums_of_shard_size(world_size: int, num_microbatches: int) -> None:
    chunk = 6
    schedule = Schedule(mode="sharded", num_microbatches=num_microbatches, mesh=Mesh(shards=world_size))
    rounds = ReductionState(schedule=schedule, rank=0)
    reducer = TreeReducer(rounds, "unit")
    with fake_mesh(world_size):
        for index in range(rounds.count):
            rounds.index = index
            with rounds.computing("backward"):
                reducer(torch.zeros(chunk), torch.zeros(world_size * chunk), dist.group.WORLD, None)  # type: ignore[arg-type]  # exists
            waiting = reducer._sum.pop_all()
            for node, value in waiting:
                assert value.untyped_storage().nbytes() == chunk * 4  # does not keep a whole exchange buffer alive
                reducer._sum.add(node, value)
            assert len(waiting) <= (0 if rounds.is_last else num_microbatches.bit_length())

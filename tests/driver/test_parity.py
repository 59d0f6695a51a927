"""The driver's decisions with parity: the needed workers, the source of the state, and the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from raysharded.driver.membership.member_order import order_members
from raysharded.driver.membership.state_source import needs
from raysharded.driver.replay.rerun import load
from raysharded.ids import WorkerId
from raysharded.layout import Held, Mesh, Parity, survives
from raysharded.protocol.messages import FromMemory, FromStart, StopReason
from tests.driver.recorded import recorded
from tests.driver.scripted import LIMITS, Run

PARITY = Parity(k=4, m=1)


def run_of(workers: int) -> Run:
    """A run with parity that has just trained step 3 with so many workers."""
    run = Run(min_workers=1, max_workers=workers, parity=PARITY)
    run.ready(*range(workers))
    run.formed()
    run.trained(1, 2, 3)
    return run


def holding(run: Run, worker: int, step: int) -> list[Held]:
    rank, world = run.state.members.index(WorkerId(worker)), len(run.state.members)
    layout = run.state.generation

    def of(medium: str, parity: Parity | None = None) -> Held:
        return Held(
            worker=WorkerId(worker),
            step=step,
            medium=medium,  # type: ignore[arg-type]  # literals
            world_size=world,
            rank=rank,
            layout_id=layout,
            parity=parity,
        )

    return [of("snapshot"), of("parity", PARITY)]


def lose(run: Run, *lost: int) -> None:
    """These are lost; all others stop and report their shards of step 3."""
    for worker in lost:
        run.lost(worker)
    for worker in [each for each in run.state.members if each not in lost]:
        run.stopped(worker, StopReason.ABORTED, 3, held=holding(run, worker, 3))


def test_a_lost_shard_is_computed_by_a_member_of_the_next_generation() -> None:
    run = run_of(6)
    lose(run, 2)
    form = run.newest_form()
    assert isinstance(form.source, FromMemory)
    assert form.source.step == 3
    (rebuild,) = form.source.rebuilds
    assert [rank for rank, _ in rebuild.lost] == [2]
    assert {holder for holder in (*rebuild.holders, *rebuild.keepers) if holder is not None} <= set(form.members)
    assert [entry["redundancy"] for entry in run.records("generation")] == ["parity (4, 1)"] * 2


def test_with_fewer_workers_than_it_needs_the_journal_has_the_shortage() -> None:
    run = run_of(5)
    lose(run, 2)
    assert isinstance(run.newest_form().source, FromMemory)
    assert run.records("generation")[-1]["redundancy"] == "mirrors: parity (4, 1) needs 5 workers"


def test_more_losses_than_parity_gives_back_go_to_the_start_or_a_checkpoint() -> None:
    run = run_of(6)
    lose(run, 2, 4)
    assert isinstance(run.newest_form().source, FromStart)


def test_losses_without_a_stripe_in_common_do_not_add_up() -> None:
    run = run_of(12)
    lose(run, 1, 7)
    source = run.newest_form().source
    assert isinstance(source, FromMemory)
    assert [rank for rank, _ in source.rebuilds[0].lost] == [1, 7]


@pytest.mark.parametrize(("silent", "needed"), [((0,), False), ((0, 4), True), ((0, 6), False)])
def test_who_can_be_computed_back_is_not_needed(silent: tuple[int, ...], needed: bool) -> None:
    assert needs(run_of(12).state, [WorkerId(worker) for worker in silent]) is needed


def test_the_workers_of_a_stripe_are_on_different_nodes() -> None:
    nodes = {WorkerId(number): f"n{number // 2}" for number in range(10)}
    limits = Run(max_workers=10, parity=PARITY).state.limits
    order = order_members(FromStart(), frozenset(nodes), limits, nodes, Mesh(shards=10))
    for node in set(nodes.values()):
        assert survives(PARITY, 10, [rank for rank, worker in enumerate(order) if nodes[worker] != node])
    mirrored = order_members(FromStart(), frozenset(nodes), LIMITS, nodes, Mesh(shards=3))
    assert len(mirrored) == 3


def test_it_can_be_replayed(tmp_path: Path) -> None:
    run = run_of(6)
    lose(run, 2)
    (found,) = load(str(recorded(tmp_path, run)))
    assert not found.differences
    assert "form generation 2 of workers 0, 1, 3, " in found.moments[-1].decided()

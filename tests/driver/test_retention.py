"""Retention during a rollback: the driver's decisions with its real committer, on a folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raysharded.checkpoint import Storage, open_storage
from raysharded.checkpoint.retention.catalog import CheckpointRef, list_checkpoints
from raysharded.checkpoint.retention.forks.fork import fork
from raysharded.checkpoint.retention.pins import pin
from raysharded.checkpoint.retention.policy import Keep
from raysharded.checkpoint.stored_claims import claim_key
from raysharded.clock import SystemClock
from raysharded.driver.checkpoints.protected import protected_checkpoints
from raysharded.driver.startup.resume_point import find, resumed, undone
from raysharded.driver.startup.run_startup import RunStartup
from raysharded.driver.state.commands import CommitSave, DeleteCheckpoints, Form
from raysharded.driver.state.events import LEAVERS, Committed, Deleted, RewindRequested
from raysharded.driver.state.state import Checkpointed, Phase, State
from raysharded.errors import StorageError
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.log import Journal, read
from raysharded.orphans.orphan_checkpoint import _saved_step
from raysharded.protocol.messages import FromCheckpoint, FromMemory, StopReason, save_prefix
from raysharded.protocol.session import FoundWorkers
from raysharded.protocol.worker_launcher import LeaveNotice
from tests.driver.scripted import LIMITS, Run, committed, of, training
from tests.driver.test_committing import WAIT_S, Driver, Stops, committed_steps
from tests.driver.test_deciding import at_a_boundary, recorded, saved_every_two
from tests.driver.test_takeover import Followed

BATCH = 4


def run_of(driver: Driver, **settings: Any) -> Run:
    """Two workers that train; the driver's committer must keep the checkpoints that this run names."""
    run = Run(max_workers=2, min_workers=2, global_batch_size=BATCH, **settings)
    run.state = replace(run.state, driver=driver.name)
    run.ready(0, 1)
    run.formed()
    driver.spared = lambda: protected_checkpoints(run.state)
    return run


def hear_all(run: Run, driver: Driver) -> None:
    """Pass the committer's messages to the run, and the run's commands to the committer, until its work is done."""
    driver.finish_work()
    while not driver.told.empty():
        carry_out(driver, run.hear(driver.told.get()))
        driver.finish_work()


def carry_out(driver: Driver, commands: Any) -> None:
    for distrust in of(commands, DeleteCheckpoints):
        driver.committer.distrust(distrust.prefixes)


def save(run: Run, driver: Driver, step: int) -> None:
    """A step is done and saved; its commit is begun."""
    run.trained(step, saves=True)
    assert of(run.all_saved(step), CommitSave)
    driver.begin_commit(step, run.state.generation)


ROLLBACKS: list[list[dict[str, Any]]] = [
    [{"kind": "rewind", "generation": 3, "to_step": 4}],
    [
        {"kind": "generation", "generation": 2},
        {"kind": "generation", "generation": 3},
        {"kind": "rewind", "to_step": 4},
    ],
    [{"kind": "corruption", "generation": 3, "verified_step": 4}],
    [
        {"kind": "generation", "generation": 3},
        {"kind": "corruption", "verified_step": 4},
        {"kind": "generation", "generation": 4},
    ],
]
"""Journals of drivers that took back the steps behind step 4, in generation 3."""


@pytest.mark.parametrize(
    "entries", ROLLBACKS, ids=["asked", "not finite", "corruption", "corruption of older versions"]
)
@pytest.mark.parametrize(
    ("step", "generation", "state", "is_undone"),
    [
        (5, 3, "committed", True),
        (9, 1, "committed", True),
        (4, 3, "committed", False),
        (5, 4, "committed", False),  # done again
        (5, None, "committed", False),  # of a fork
        (5, 3, "retired", False),
    ],
)
def test_a_checkpoint_behind_the_step_that_a_run_went_back_to_is_undone_if_it_is_of_a_generation_before(
    entries: list[dict[str, Any]], step: int, generation: int | None, state: Any, is_undone: bool
) -> None:
    ref = CheckpointRef(step=step, save_id="it", prefix="checkpoints/it", state=state, keys=(), generation=generation)
    assert undone(entries, [ref]) == (frozenset({ref.prefix}) if is_undone else frozenset())
    named = [*entries, {"kind": "rewind", "to_step": 9, "generation": 1, "distrusted": ["checkpoints/other"]}]
    assert "checkpoints/other" in undone(named, [ref])


def found_after_all(run: Run, driver: Driver) -> int:
    """The step that a run would resume from if both driver and workers were lost now."""
    hear_all(run, driver)
    driver.committer.close(WAIT_S)
    entries = [{"kind": "rewind", **entry} for entry in run.records("rewind")]
    gone = undone(entries, list_checkpoints(driver.files.storage))
    checkpoint = find(driver.files, without=gone).newest.checkpoint
    return checkpoint.step if checkpoint is not None else 0


@pytest.mark.parametrize(("keep_last", "to_step"), [(1, 6), (2, 4)])
def test_the_checkpoint_that_the_run_goes_back_to_stays_though_newer_ones_are_committed_meanwhile(
    tmp_path: Path, keep_last: int, to_step: int
) -> None:
    plain = open_storage(str(tmp_path))
    slow = Stops(plain, lambda key: "step-0000000008" in key and key.endswith("manifest.json"))
    driver = Driver(slow, "d", keep=Keep(last=keep_last))  # type: ignore[arg-type]  # all of a storage's methods, found by name
    driver.own()
    run = run_of(driver)
    for step in (2, 4, 6):
        run.trained(step - 1)
        save(run, driver, step)
        hear_all(run, driver)
    run.trained(7)
    save(run, driver, 8)
    assert slow.reached.wait(WAIT_S)
    run.hear(RewindRequested(step=to_step))
    at_a_boundary(run, 9)
    run.formed()
    slow.may_go.set()  # the commit of step 8 ends, and retention follows it
    hear_all(run, driver)
    carry_out(driver, recorded(run))
    assert found_after_all(run, driver) == to_step
    assert run.state.checkpoint is not None
    assert run.state.checkpoint.step == to_step


class Unconfirmed(Stops):
    """A storage that does not confirm one put, which is made."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        made = self._storage.put_if_absent(key, data)
        if self._at(key):
            raise StorageError("no answer")
        return made


def test_a_run_that_went_back_does_not_resume_from_an_undone_checkpoint_whose_commit_was_not_confirmed(
    tmp_path: Path,
) -> None:
    plain = open_storage(str(tmp_path))
    driver = Driver(Unconfirmed(plain, lambda key: key == claim_key(3)), "d")  # type: ignore[arg-type]  # as above
    driver.own()
    run = run_of(driver)
    for step in (2, 4):
        run.trained(step - 1)
        save(run, driver, step)
        hear_all(run, driver)
    assert committed_steps(plain) == [2, 4]
    assert [entry["step"] for entry in run.records("checkpoint_failed")] == [4], "the driver knows of 2 alone"
    generation = {"generation": int(run.state.generation), "step": 0}
    run.hear(RewindRequested(step=2))
    at_a_boundary(run, 5)
    run.formed()
    recorded(run)
    assert found_after_all(run, driver) == 2

    clock = SystemClock()
    journal = Journal(plain, clock, "d")
    journal.add("generation", generation, at=clock.wall())
    (rewind,) = run.records("rewind")
    journal.append("rewind", rewind, durable=True)
    assert _saved_step(plain, list(read(plain))) == 2, "workers without a driver write step 3"
    newer = Driver(plain, "newer")
    startup = RunStartup(
        newer.files,
        Followed(),
        lambda _terms, _hold: FoundWorkers(),
        newer.committer.claims,
        Journal(plain, clock, "newer", still_owns=lambda: True),
        clock,
        lease_s=1.0,
        orphan_wait_s=1.0,
    )
    state, _ = startup.resume(startup.own(State(limits=LIMITS)))
    assert (state.step, state.reached, committed_steps(plain)) == (2, 2, [2])


def test_a_rollback_target_is_kept_from_the_request_on_until_there_is_a_newer_one() -> None:
    run = saved_every_two(7)
    prefixes = {step: committed(step).prefix for step in (2, 4, 6)}
    assert protected_checkpoints(run.state).prefixes == {prefixes[6]}
    run.hear(RewindRequested(step=4))
    assert protected_checkpoints(run.state).prefixes == {prefixes[4], prefixes[6]}
    at_a_boundary(run, 8)
    run.hear(RewindRequested(step=2))  # meanwhile it is formed from 4
    assert protected_checkpoints(run.state).prefixes == set(prefixes.values())
    run.formed()
    recorded(run)
    assert protected_checkpoints(run.state).prefixes == {prefixes[2], prefixes[4]}
    run.trained(5)
    run.stopped(0, StopReason.BOUNDARY, 5)
    run.stopped(1, StopReason.BOUNDARY, 5)
    run.formed()
    recorded(run)
    assert protected_checkpoints(run.state).prefixes == {prefixes[2]}
    run.trained(3)
    run.lost(1)
    run.stopped(0, StopReason.ABORTED, 3, held=[*run.holding(0, 3), *run.holding(1, 3)])
    run.ready(2)
    run.wait(3)
    assert isinstance(run.newest_form().source, FromMemory)
    assert protected_checkpoints(run.state).prefixes == {prefixes[2]}, "nothing else is left on storage"


def test_what_is_written_and_the_newest_that_is_verified_are_kept() -> None:
    run = saved_every_two(7)
    assert committed(4).prefix not in protected_checkpoints(run.state).prefixes
    assert committed(4).prefix in protected_checkpoints(replace(run.state, verified_step=5)).prefixes
    run.trained(8, saves=True)
    driver = run.state.driver
    assert save_prefix(8, run.state.generation, driver) in protected_checkpoints(run.state).prefixes


def test_a_fork_holds_on_to_its_parents_checkpoint_while_it_is_formed_from_it_to_go_back() -> None:
    run = saved_every_two(7)
    parents = replace(run.state.older_checkpoints[0], url="memory://parent")
    run.state = replace(run.state, older_checkpoints=(parents, *run.state.older_checkpoints[1:]))
    assert not protected_checkpoints(run.state).parents
    run.hear(RewindRequested(step=2))
    at_a_boundary(run, 8)
    run.hear(RewindRequested(step=6))
    assert protected_checkpoints(run.state).parents
    run.formed()
    assert protected_checkpoints(run.state).parents


def test_a_checkpoint_that_is_deleted_while_the_run_goes_back_to_it_is_refused_and_the_run_continues() -> None:
    run = saved_every_two(7)
    run.hear(RewindRequested(step=4))
    at_a_boundary(run, 8)
    run.hear(Deleted(prefixes=(committed(4).prefix,)))
    run.formed()
    for member in run.state.members:
        run.stopped(member, StopReason.ABORTED, 8, held=run.holding(member, 8))
    (entry,) = run.records("rewind_refused")
    assert "pin it" in entry["reason"]
    assert isinstance(run.newest_form().source, FromMemory)
    assert run.newest_form().source.step == 8
    run.formed()
    assert run.state.phase is Phase.TRAINING


def forked(tmp_path: Path, stops_at: Callable[[str], bool] = lambda _: False) -> tuple[Storage, Driver, State]:
    """A parent's storage, and the driver of its fork at step 4, whose storage stops at these keys."""
    parent = Driver(open_storage(str(tmp_path / "parent")), "p")
    parent.own()
    parent.commit(4, 1)
    parent.committer.close(WAIT_S)
    child = Driver(Stops(open_storage(str(tmp_path / "child")), stops_at), "c")  # type: ignore[arg-type]  # as above
    [ref] = list_checkpoints(parent.files.storage)
    fork(parent.files.storage, ref, child.files.storage)
    child.own()
    return parent.files.storage, child, resumed(State(limits=LIMITS), child.files, find(child.files))


def test_a_fork_goes_back_to_where_it_began_as_long_as_it_holds_on_to_it(tmp_path: Path) -> None:
    _, child, state = forked(tmp_path, lambda key: "step-0000000006" in key and key.endswith("manifest.json"))
    run = run_of(child, checkpoint=state.checkpoint)
    run.trained(5)
    save(run, child, 6)
    assert child.files.storage.reached.wait(WAIT_S)  # type: ignore[attr-defined]
    run.hear(RewindRequested(step=4))
    child.files.storage.may_go.set()  # type: ignore[attr-defined]  # the commit ends, and retention follows it
    hear_all(run, child)
    assert any(ref.state == "reference" for ref in list_checkpoints(child.files.storage))
    at_a_boundary(run, 7)
    run.formed()
    carry_out(child, recorded(run))
    assert found_after_all(run, child) == 4


def test_a_fork_that_has_saved_a_checkpoint_does_not_go_back_to_its_parents(tmp_path: Path) -> None:
    _, child, state = forked(tmp_path)
    run = run_of(child, checkpoint=state.checkpoint)
    run.trained(5)
    save(run, child, 6)
    hear_all(run, child)
    assert not any(ref.state == "reference" for ref in list_checkpoints(child.files.storage))
    run.hear(RewindRequested(step=4))
    (entry,) = run.records("rewind_refused")
    assert "checkpoints of: 6" in entry["reason"]


def test_a_pinned_checkpoint_of_undone_steps_takes_no_other_ones_place(tmp_path: Path) -> None:
    driver = Driver(open_storage(str(tmp_path)), "d", keep=Keep(last=2))
    driver.own()
    driver.commit(4, 1)
    driver.commit(6, 1)
    refs = {ref.step: ref for ref in list_checkpoints(driver.files.storage)}
    pin(driver.files.storage, "good", refs[6])
    driver.committer.distrust([refs[6].prefix])
    for step in (5, 7, 8):
        driver.begin_commit(step, 2)
        while not isinstance(driver.told.get(timeout=WAIT_S), Committed):
            pass
    driver.committer.close(WAIT_S)
    assert committed_steps(driver.files.storage) == [6, 7, 8]


def test_of_two_checkpoints_of_a_step_the_one_that_stays_is_resumed_from() -> None:
    run = training(3, min_workers=2)
    run.trained(1)
    run.trained(2, saves=True)
    run.all_saved(2)  # its commit is under way
    run.lost(2)
    for member in (0, 1):
        run.stopped(member, StopReason.ABORTED, 2, held=run.holding(member, 1))
    assert run.newest_form().source.step == 1
    run.hear(committed(2, 1))
    run.formed()
    run.trained(2, saves=True)
    run.all_saved(2)
    run.hear(committed(2, 2))
    assert run.state.checkpoint is not None
    assert run.state.checkpoint.prefix == save_prefix(2, GenerationId(2))
    run.hear(Deleted(prefixes=(save_prefix(2, GenerationId(1)),)))
    assert run.state.older_checkpoints == ()
    run.hear(Deleted(prefixes=(save_prefix(2, GenerationId(2)),)))
    assert run.state.checkpoint is not None, "who reads it says what is wrong"


@pytest.mark.parametrize("mirrors", [True, False])
def test_one_checkpoint_is_written_for_who_leaves_a_run_that_went_back(mirrors: bool) -> None:
    run = Run(max_workers=2, min_workers=2, mirrors=mirrors, max_steps=1000, global_batch_size=BATCH)
    run.ready(0, 1)
    run.formed()
    for step in range(1, 101):
        run.trained(step, saves=step == 10)
    run.all_saved(10)
    run.committed(10)
    run.hear(RewindRequested(step=10))
    run.hear(LeaveNotice(workers=(WorkerId(1),), reason="drained", within_s=math.inf))
    at_a_boundary(run, 101)
    run.formed()
    recorded(run)
    saves = 0
    for step in range(11, 41):
        if run.state.phase is not Phase.TRAINING:
            break
        asked = LEAVERS in run.state.asked
        run.trained(step, asked=asked)
        if asked:
            run.all_saved(step)
            run.committed(step)
            saves += 1
    assert saves == 1
    assert bool(run.state.leaving) == mirrors
    assert isinstance(run.all(Form)[1].spec.source, FromCheckpoint)


def test_the_checkpoint_that_a_run_was_resumed_from_is_needed_until_its_workers_hold_the_state() -> None:
    old = Checkpointed(step=4, prefix="old", digest="d")
    run = Run(max_workers=2, max_steps=20, checkpoint=old, audits=False, resumed={"verified_step": 4})
    run.ready(0, 1)
    assert protected_checkpoints(run.state).prefixes == {"old"}
    run.formed(0)
    assert protected_checkpoints(run.state).prefixes == {"old"}
    run.formed()
    assert protected_checkpoints(run.state).prefixes == {"old"}, "it is the newest"
    run.trained(5, saves=True)
    run.all_saved(5)
    run.committed(5)
    assert "old" not in protected_checkpoints(run.state).prefixes
    audited = replace(run.state, limits=replace(run.state.limits, audits=True))
    assert "old" in protected_checkpoints(audited).prefixes, "the target of a rollback"

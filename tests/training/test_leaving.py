"""Workers that are requested to leave, and spares that are kept ready: real processes; no step is computed twice."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from raysharded.actors.shards.store import ShardStore
from raysharded.driver.driver import Driver
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.state import State
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.job import Job
from raysharded.testing import Fault, FaultPlan
from tests.training.harness import GptTask, Outcome, SmallTask, Tokens, make_driver, make_job, make_limits, train
from tests.training.test_checkpoints import WAIT_S, Listening

pytestmark = pytest.mark.procs
MICROBATCHES = 4
_MORE_THAN_ANY = 10_000


_STEPS = 16
"""More than most of these runs have."""


@cache
def undisturbed(steps: int, *, small: bool, save_every: int | None = None) -> Outcome:
    """One worker's outcome, of `SmallTask` or of `GptTask`."""
    task = SmallTask() if small else GptTask()
    return train(1, task=task, microbatches=MICROBATCHES, steps=steps, save_every=save_every)


def undisturbed_bits(steps: int, *, small: bool) -> tuple[str, str | None]:
    """One worker's numbers and fingerprint after so many steps. Those of `SmallTask` are of a run that all share, if
    that has a checkpoint of the step."""
    if small:
        shared = undisturbed(_STEPS, small=True, save_every=1)
        fingerprints = {fields["step"]: fields["fingerprint"] for fields in shared.of("checkpoint")}
        if steps in fingerprints:
            return repr(shared.numbers[:steps]), fingerprints[steps]
    return undisturbed(steps, small=small).bits


class PacedTokens(Tokens):
    """Slow, until a file states that the awaited event has happened: few steps are computed meanwhile."""

    def __init__(self, happened: Path) -> None:
        super().__init__()
        self.happened = happened

    def __getitem__(self, index: int) -> Any:
        if not self.happened.exists():
            time.sleep(0.1)
        return super().__getitem__(index)


class PacedTask(SmallTask):
    """Applies its steps slowly, until the file exists: data that is a list needs no process that reads it."""

    def __init__(self, happened: Path) -> None:
        self.happened = happened

    def lr_scale(self, step: int) -> float:
        if not self.happened.exists():
            time.sleep(0.4)
        return super().lr_scale(step)


class Seen(Listening):
    """Waits until something is recorded in the journal."""

    def __init__(self) -> None:
        super().__init__()
        self._news = threading.Condition()

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        super().__call__(kind, fields)
        with self._news:
            self._news.notify_all()

    def wait(self, what: Callable[[Seen], object]) -> None:
        with self._news:
            assert self._news.wait_for(lambda: what(self), WAIT_S)

    def first(self, kind: str) -> Mapping[str, Any]:
        return self.of(kind)[0]

    @property
    def step(self) -> int:
        return max((fields["step"] for fields in self.of("step")), default=0)

    @property
    def memberships(self) -> list[set[int]]:
        return [set(fields["members"]) for fields in self.of("generation")]

    def assert_every_step_is_computed_once(self) -> None:
        assert [fields["step"] for fields in self.of("step")] == list(range(1, self.step + 1))

    def assert_no_step_is_computed_twice(self) -> None:
        self.assert_every_step_is_computed_once()
        assert [fields["source"] for fields in self.of("generation")[1:]] == ["memory"] * (len(self.memberships) - 1)
        assert self.of("recovery") == []


def drive(
    job: Job,
    limits: DriverConfig,
    act: Callable[[Driver, Seen], None],
    prepare: Mapping[WorkerId, Callable[[], None]] | None = None,
) -> tuple[State, Seen]:
    """Run until `act` is done, which is called after two steps, and then to a last checkpoint. That must equal an
    undisturbed run's, as must the numbers of all steps before it. `prepare`: called first in a worker's process."""
    seen = Seen()
    driver = make_driver(job, limits, seen, prepare=prepare)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(driver.run)
        try:
            seen.wait(lambda s: s.step >= 2 or running.done())
            act(driver, seen)
            paced = job.task if isinstance(job.task, PacedTask) else job.data
            paced.happened.touch()
            driver.stop(checkpoint_within_s=WAIT_S)
        except BaseException:
            driver.stop()
            raise
        state = running.result(WAIT_S)
    last = seen.of("checkpoint")[-1]
    assert state.checkpoint is not None
    assert state.checkpoint.step == last["step"] > 2
    numbers = tuple(seen.numbers[step] for step in range(1, last["step"] + 1))
    small = isinstance(job.task, SmallTask)
    assert (repr(numbers), last["fingerprint"]) == undisturbed_bits(last["step"], small=small)
    return state, seen


def tell(driver: Driver, *workers: int) -> None:
    for worker in workers:
        os.kill(driver.state.facts[WorkerId(worker)].pid, signal.SIGTERM)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def a_job(tmp_path: Path) -> Job:
    """A run whose data is paced, for a task that is not."""
    data = PacedTokens(tmp_path / "happened")
    job = make_job(f"{tmp_path}/run", task=SmallTask(), microbatches=MICROBATCHES, data=data)
    return replace(job, max_steps=_MORE_THAN_ANY)


def a_paced_job(tmp_path: Path, *, faults: tuple[Fault, ...] = (), notices: tuple[Any, ...] = ()) -> Job:
    """A run whose task is paced."""
    plan = FaultPlan(faults=faults, folder=str(tmp_path)) if faults else None
    job = make_job(f"{tmp_path}/run", task=PacedTask(tmp_path / "happened"), microbatches=MICROBATCHES, faults=plan)
    return replace(job, preemption_notices=notices, max_steps=_MORE_THAN_ANY)


def test_a_worker_that_is_requested_to_leave_costs_no_step_and_is_no_loss_and_is_replaced(tmp_path: Path) -> None:
    job = a_paced_job(tmp_path)

    def act(driver: Driver, seen: Seen) -> None:
        leaver, pid = driver.state.members[1], driver.state.facts[driver.state.members[1]].pid
        tell(driver, leaver)
        seen.wait(lambda s: s.of("worker_left"))
        assert seen.first("worker_left")["worker"] == leaver
        assert is_gone(pid)
        seen.wait(lambda s: 3 in s.memberships[-1])

    state, seen = drive(job, make_limits(job, 3, min_workers=2, join_wait_s=WAIT_S), act)
    seen.assert_no_step_is_computed_twice()
    assert (state.losses, state.preemptions) == (0, 1)
    assert seen.first("worker_leaving")["reason"] == "SIGTERM"
    assert 20 < seen.first("worker_leaving")["notice_s"] <= 25
    assert seen.first("worker_left")["seconds"] < 10  # and not its whole grace period


@pytest.mark.long  # in the notice's test below both workers of a run leave at once
def test_neighbours_that_are_requested_to_leave_at_once_cost_no_step_though_they_keep_each_others_mirrors(
    tmp_path: Path,
) -> None:
    job = a_paced_job(tmp_path)

    def act(driver: Driver, seen: Seen) -> None:
        leavers = driver.state.members[1:]
        tell(driver, *leavers)
        seen.wait(lambda s: len(s.of("worker_left")) == 2)

    state, seen = drive(job, make_limits(job, 3, min_workers=1, join_wait_s=WAIT_S), act)
    seen.assert_no_step_is_computed_twice()
    assert (state.losses, state.preemptions) == (0, 2)


@pytest.mark.long  # `tests/driver/test_leaving.py` decides it; the worker leaves as in the tests above
def test_a_run_of_fixed_size_keeps_who_must_leave_until_the_replacement_is_there(tmp_path: Path) -> None:
    job = a_paced_job(tmp_path)

    def act(driver: Driver, seen: Seen) -> None:
        tell(driver, driver.state.members[0])
        seen.wait(lambda s: s.of("worker_left"))
        seen.wait(lambda s: s.of("checkpoint"))  # it might have left before the replacement was there

    _, seen = drive(job, make_limits(job, 2), act)
    seen.assert_no_step_is_computed_twice()
    assert [len(members) for members in seen.memberships] == [2, 2]


@pytest.mark.long  # `tests/driver/test_leaving.py` decides it
def test_the_only_worker_hands_its_state_over_or_leaves_after_a_checkpoint(tmp_path: Path) -> None:
    job = a_paced_job(tmp_path)

    def act(driver: Driver, seen: Seen) -> None:
        tell(driver, driver.state.members[0])
        seen.wait(lambda s: s.memberships[-1] == {1})

    state, seen = drive(job, make_limits(job, 1), act)
    assert (state.losses, state.preemptions) == (0, 1)
    assert seen.of("generation")[-1]["source"] in ("memory", "checkpoint")


def test_when_the_keeper_of_its_mirror_dies_meanwhile_the_leaver_still_gives_its_state(tmp_path: Path) -> None:
    fault = Fault(worker=WorkerId(2), step=1, phase="transfer")
    job = a_paced_job(tmp_path, faults=(fault,))

    def act(driver: Driver, seen: Seen) -> None:
        members = driver.state.members
        tell(driver, members[members.index(WorkerId(2)) - 1])
        seen.wait(lambda s: s.of("worker_lost") and s.of("worker_left"))

    state, seen = drive(job, make_limits(job, 3, min_workers=1, max_worker_losses=1, join_wait_s=WAIT_S), act)
    assert FaultPlan(faults=(fault,), folder=str(tmp_path)).fired(fault)
    assert [fields["worker"] for fields in seen.of("worker_lost")] == [2]
    assert seen.first("recovery")["steps_redone"] == 0
    seen.assert_every_step_is_computed_once()
    assert state.preemptions == 1


@pytest.mark.long  # in the test above the keeper dies while the same state is sent
@pytest.mark.parametrize("phase", ["ready", "form", "transfer"])
def test_a_replacement_that_dies_while_it_joins_costs_no_step(tmp_path: Path, phase: str) -> None:
    fault = Fault(worker=WorkerId(3), step=0, phase=phase)
    job = a_paced_job(tmp_path, faults=(fault,))

    def act(driver: Driver, seen: Seen) -> None:
        tell(driver, driver.state.members[1])
        seen.wait(lambda s: 4 in s.memberships[-1])  # the replacement's replacement

    limits = make_limits(job, 3, min_workers=2, max_worker_losses=1, start_backoff_s=0.1)
    _, seen = drive(job, limits, act)
    assert FaultPlan(faults=(fault,), folder=str(tmp_path)).fired(fault)
    seen.assert_every_step_is_computed_once()
    assert {fields["source"] for fields in seen.of("generation")[1:]} == {"memory"}


@dataclass(frozen=True)
class NoticeFile:
    """A notice for the machine of the process that has a certain file."""

    folder: str

    def __call__(self) -> float | None:
        return 20.0 if Path(self.folder, f"notice{os.getpid()}").exists() else None


def test_a_notice_for_a_machine_reaches_all_its_workers_at_once(tmp_path: Path) -> None:
    job = a_paced_job(tmp_path, notices=(NoticeFile(str(tmp_path)),))

    def act(driver: Driver, seen: Seen) -> None:
        (tmp_path / f"notice{driver.state.facts[WorkerId(0)].pid}").touch()
        seen.wait(lambda s: {fields["worker"] for fields in s.of("worker_left")} == {0, 1})

    state, seen = drive(job, make_limits(job, 2, min_workers=1, join_wait_s=WAIT_S), act)
    seen.assert_no_step_is_computed_twice()
    assert (state.losses, state.preemptions) == (0, 2)
    assert len({fields["step"] for fields in seen.of("worker_leaving")}) == 1


def note_buffers(folder: str) -> None:
    """In a worker's process: list the complete buffers when older layouts are dropped, before it and after it."""
    drop = ShardStore.drop_other_layouts

    def noted(store: ShardStore) -> list[Any]:
        return [[b.medium, b.step, b.layout, b.data.data_ptr()] for b in store._buffers if b.complete]

    def dropping(store: ShardStore, layout: GenerationId) -> None:
        before = noted(store)
        drop(store, layout)
        with Path(folder, f"buffers{os.getpid()}").open("a") as file:
            file.write(json.dumps({"layout": layout, "before": before, "after": noted(store)}) + "\n")

    setattr(ShardStore, "drop_other_layouts", dropping)  # noqa: B010 - in this process alone


Spared = tuple[Seen, Path, dict[int, int]]


@pytest.fixture(scope="module")
def spared(tmp_path_factory: pytest.TempPathFactory) -> Spared:
    """A run of three in which a spare took a lost place, its folder, and the processes of the first workers."""
    folder = tmp_path_factory.mktemp("spared")
    job, pids = a_paced_job(folder), dict[int, int]()

    def act(driver: Driver, seen: Seen) -> None:
        seen.wait(lambda s: len(s.of("worker_ready")) == 4)
        pids.update({worker: driver.state.facts[worker].pid for worker in driver.state.members})
        os.kill(pids[driver.state.members[1]], signal.SIGKILL)
        seen.wait(lambda s: s.of("recovery"))
        seen.wait(lambda s: len(s.of("worker_ready")) == 5)  # another spare is started

    prepare = {WorkerId(worker): partial(note_buffers, str(folder)) for worker in range(5)}
    _, seen = drive(
        job, make_limits(job, 3, min_workers=1, max_worker_losses=1, spares=1, join_wait_s=WAIT_S), act, prepare
    )
    return seen, folder, pids


def test_a_spare_takes_the_place_of_a_lost_worker_at_once_and_another_spare_is_started(spared: Spared) -> None:
    seen, *_ = spared
    assert [len(members) for members in seen.memberships] == [3, 3]
    assert seen.first("recovery")["workers_after"] == 3


def test_survivors_keep_the_memory_of_their_buffers_when_a_spare_takes_the_lost_place(spared: Spared) -> None:
    seen, folder, pids = spared
    first, second = (fields["members"] for fields in seen.of("generation"))
    lost, kept = first[1], dict[int, set[str]]()
    assert [now for now, before in zip(second, first, strict=True) if now == before] == [first[0], first[2]]
    for worker in first:
        if worker != lost:
            lines = Path(folder, f"buffers{pids[worker]}").read_text().splitlines()
            (dropped,) = (line for line in map(json.loads, lines) if line["layout"] == 2)
            places = {(medium, step): place for medium, step, layout, place in dropped["before"] if layout == 1}
            kept[worker] = {
                medium for medium, step, _, place in dropped["after"] if places.get((medium, step), 0) == place
            }
    assert kept[first[2]] == {"snapshot", "mirror"}, "the mirror is that of the lost worker"
    assert "snapshot" in kept[first[0]]


@pytest.mark.long
def test_a_spare_that_is_requested_to_leave_just_leaves(tmp_path: Path) -> None:
    job = a_paced_job(tmp_path)

    def act(driver: Driver, seen: Seen) -> None:
        seen.wait(lambda s: len(s.of("worker_ready")) == 4)
        (spare,) = driver.state.ready - set(driver.state.members)
        tell(driver, spare)
        seen.wait(lambda s: s.of("worker_left"))
        seen.wait(lambda s: len(s.of("worker_ready")) == 5)

    state, seen = drive(job, make_limits(job, 3, spares=1), act)
    assert len(seen.memberships) == 1
    assert (state.losses, state.preemptions) == (0, 1)

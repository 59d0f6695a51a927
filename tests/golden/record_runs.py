"""Recordings of real runs, with faults of every kind: `python -m tests.golden.record_runs [NAME ...]`.

Each is a run of the real driver and of real worker processes, ten minutes in all; a few are told to the machine alone.
`--render` leaves the recordings as they are, and keeps what today's readers make of them and of the journals of earlier
versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import raysharded as rs
from raysharded.actors.process import environment
from raysharded.checkpoint import Storage, open_storage
from raysharded.checkpoint.retention.policy import Keep
from raysharded.config import OnNonFinite
from raysharded.driver.driver import Driver
from raysharded.driver.replay.rerun import load
from raysharded.driver.state.commands import AskReport
from raysharded.driver.state.events import CheckpointRequested, LeadershipLost, Overtaken, ReshardRequested
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.driver.state.state import Phase
from raysharded.errors import InexactError, RunFailed, StepFailed, StorageError, TaskError
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.log import FOLDER as JOURNAL
from raysharded.protocol.messages import StopReason
from raysharded.protocol.worker_launcher import GcsHealth, NodeBack, NodeLost
from raysharded.testing import Chaos, Fault, FaultPlan
from raysharded.testing.processes import ProcessLauncher
from raysharded.testing.storages import StorageAround
from tests import patches
from tests.driver.recorded import recorded
from tests.driver.scripted import Run, training
from tests.driver.test_links import break_off, cut, on
from tests.driver.test_tensor_groups import in_pairs, stop_at_boundary
from tests.faults.dying import Dies, leave
from tests.faults.test_stragglers import SlowInOneWorker
from tests.golden import recordings
from tests.paths import ROOT
from tests.training.harness import Collector, GptTask, Tokens, grouped, make_driver, make_job, make_limits, samples
from tests.training.test_checkpoints import Storing, damage
from tests.training.test_non_finite import Diverging, first_sample_of
from tests.training.test_preparation import fail_beside

REPOSITORY = ROOT
NODES = ("node-a", "node-b", "node-c")
MOST_WORKERS = 64
"""So many of a run's workers, at most, are told which node they are on."""
WAIT_S = 120.0
HANG_S = 2.0

Happened = Callable[[str, Mapping[str, Any]], bool]
Act = Callable[[Driver], None]


class Slow(Tokens):
    """Leaves time to do something between two steps."""

    def __init__(self, seconds: float = 0.01) -> None:
        super().__init__()
        self._seconds = seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return super().__getitem__(index)


class Died(BaseException):
    """The driver ends in the middle of something."""


def be_on(node: str, then: Callable[[], None] = lambda: None) -> None:
    """In a worker's process: believe to be on a node, whatever this machine is called."""
    patches.replace(platform, "node", lambda: node)
    patches.replace(environment, "node_id", lambda: node)
    then()


def be_another_processor() -> None:
    """In a worker's process: compute with other instructions."""
    vars(torch.backends.cpu)["get_cpu_capability"] = lambda: "OTHER"


def fail_to_start() -> None:
    """In a worker's process: end before anything else."""
    os._exit(3)


def after(kind: str, count: int = 1, **fields: Any) -> Happened:
    """When the `count`-th entry of a kind with such fields is made; `step=n`: of step n or later."""
    left = [count]

    def happened(found: str, told: Mapping[str, Any]) -> bool:
        step = fields.get("step")
        others = {name: value for name, value in fields.items() if name != "step"}
        if found != kind or (step is not None and told["step"] < step):
            return False
        if any(told.get(name) != value for name, value in others.items()):
            return False
        left[0] -= 1
        return left[0] == 0

    return happened


@dataclass
class Listening(Collector):
    """Collects the journal, and does each of some things once, in the driver's thread or beside it."""

    plans: list[tuple[Happened, Act]] = field(default_factory=list)
    driver: Driver | None = None

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        super().__call__(kind, fields)
        for plan in [plan for plan in self.plans if plan[0](kind, fields)]:
            self.plans.remove(plan)
            assert self.driver is not None
            plan[1](self.driver)

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [fields for found, fields in self.entries if found == kind]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Where one run is recorded."""

    folder: Path

    @property
    def url(self) -> str:
        """Of the run."""
        return str(self.folder / "run")

    def run(
        self,
        workers: int,
        *acts: tuple[Happened, Act],
        faults: Sequence[Fault] = (),
        plans: Callable[..., FaultPlan] = FaultPlan,
        steps: int = 12,
        nodes: Mapping[int, str] | str = "node-a",
        first: Mapping[int, Callable[[], None]] | None = None,
        task: rs.Task | None = None,
        data: Any = None,
        save_every: int | None = None,
        engine: rs.EngineConfig | None = None,
        evaluation: rs.EvalConfig | None = None,
        on_non_finite: OnNonFinite = "stop",
        storage: Storage | None = None,
        groups: int | None = None,
        resumed: bool = False,
        save_at_end: bool = True,
        metadata: Mapping[str, Any] | None = None,
        on_storage: Mapping[str, Any] | None = None,
        expect: type[BaseException] | None = None,
        **limits: Any,
    ) -> Listening:
        """Record a driver to its end; all faults must strike, and all that is to be done must have been."""
        plan = plans(faults=tuple(faults), folder=str(self.folder))
        job = make_job(
            self.url,
            task=task,
            microbatches=4,
            steps=steps,
            engine=engine,
            evaluation=evaluation,
            data=data or Slow(),
            save_every=save_every,
            faults=plan if faults else None,
            on_non_finite=on_non_finite,
        )
        job = replace(job, save_at_end=save_at_end)
        on = nodes if isinstance(nodes, Mapping) else {}
        prepare = {
            WorkerId(number): partial(
                be_on, on.get(number, NODES[0]), *([(first or {})[number]] if number in (first or {}) else [])
            )
            for number in range(MOST_WORKERS)
        }
        listener = Listening(plans=list(acts))
        all_limits = make_limits(
            job,
            workers,
            **{"join_wait_s": 60.0, "grouping": grouped(job, groups), "save_at_end": save_at_end, **limits},
        )
        driver = listener.driver = make_driver(
            job,
            all_limits,
            listener,
            storage=storage,
            keep=Keep(last=9),
            metadata=metadata,
            record_events=True,
            prepare=prepare,
            on_storage=on_storage,
        )
        try:
            if resumed:
                driver.restore()
            driver.run()
        except BaseException as error:
            if expect is None or not isinstance(error, expect):
                raise
        else:
            assert expect is None, f"the run was to end with {expect}"
        left = [fault for fault in plan.faults if not plan.fired(fault)]
        assert not left, f"these faults did not strike: {left}"
        assert not listener.plans, f"{len(listener.plans)} things were not done"
        return listener


def kill(worker: int, step: int, phase: str) -> Fault:
    return Fault(worker=WorkerId(worker), step=step, phase=phase)


def signal_to(index: int, number: int) -> Act:
    """A signal to a member, by its rank."""

    def act(driver: Driver) -> None:
        os.kill(driver.state.facts[driver.state.members[index]].pid, number)

    return act


def require(listener: Listening, *kinds: str) -> None:
    """That the run had these entries: or else the recording would not show what it is for."""
    missing = [kind for kind in kinds if not listener.of(kind)]
    assert not missing, f"nothing of {missing} in {sorted({kind for kind, _ in listener.entries})}"


# -- the runs --


def killed_in_every_phase(stage: Stage) -> None:
    faults = [
        *(kill(number, step, phase) for number, (step, phase) in enumerate(_PHASES)),
        kill(len(_PHASES), 1, "form"),
        kill(len(_PHASES) + 1, 1, "transfer"),
    ]
    stage.run(
        3,
        faults=faults,
        steps=60,
        save_every=5,
        min_workers=1,
        max_worker_losses=12,
        start_backoff_s=0.1,
        data=Slow(0.02),
        evaluation=rs.EvalConfig(data=Tokens(4), every_steps=20, num_samples=4),
    )


_PHASES = ((2, "data"), (4, "forward"), (6, "backward"), (8, "agree"), (10, "apply"), (12, "snapshot"), (14, "save"))


def two_killed_at_once(stage: Stage) -> None:
    faults = [
        *(kill(number, 3, "backward") for number in (1, 3)),  # their mirrors are with others
        *(kill(number, 8, "forward") for number in (4, 0)),  # neighbours: back to the checkpoint
    ]
    found = stage.run(5, faults=faults, steps=12, save_every=2, min_workers=1, max_worker_losses=6, data=Slow(0.03))
    require(found, "recovery", "checkpoint", "worker_lost")


def hanging(stage: Stage) -> None:
    faults = [
        Fault(worker=WorkerId(1), step=3, phase="forward", kind="stop"),
        Fault(worker=WorkerId(2), step=6, phase="data", kind="stuck"),
        Fault(worker=WorkerId(0), step=9, phase="backward", kind="drop"),
        Fault(worker=WorkerId(3), step=1, phase="form", kind="wedge", seconds=60.0),
    ]
    found = stage.run(
        3,
        faults=faults,
        steps=30,
        min_workers=1,
        max_worker_losses=6,
        hang_timeout_s=HANG_S,
        forming_patience_s=2.0,
        start_backoff_s=0.1,
        data=Slow(0.02),
    )
    require(found, "stuck", "recovery")


def who_alone_holds_a_shard_is_waited_for(stage: Stage) -> None:
    faults = [
        kill(2, 4, "forward"),  # the keeper of the next one's mirror
        Fault(worker=WorkerId(1), step=4, phase="form", kind="wedge", seconds=8.0),
    ]
    found = stage.run(4, faults=faults, steps=8, min_workers=1, max_worker_losses=1, forming_patience_s=2.0)
    require(found, "stuck", "recovery")


def leaving(stage: Stage) -> None:
    found = stage.run(
        3,
        (after("step", step=3), signal_to(1, signal.SIGTERM)),
        (after("step", step=20), signal_to(0, signal.SIGTERM)),
        steps=40,
        data=Slow(0.02),
        min_workers=2,
        spares=1,
    )
    require(found, "worker_leaving", "worker_left")


def without_mirrors_one_leaves_after_a_checkpoint(stage: Stage) -> None:
    found = stage.run(
        3,
        (after("step", step=2), signal_to(1, signal.SIGTERM)),
        engine=rs.EngineConfig(mirrors=False),
        steps=12,
        min_workers=2,
    )
    require(found, "worker_leaving", "worker_lost")


def resized(stage: Stage) -> None:
    found = stage.run(
        4,
        (after("step", step=2), lambda driver: driver.resize(2)),
        (after("worker_left", 2), lambda driver: driver.resize(3)),
        (after("step", step=5), lambda driver: driver.resize(9)),
        steps=40,
        data=Slow(0.02),
        min_workers=1,
    )
    require(found, "resize", "resize_refused", "worker_left")


def paused(stage: Stage) -> None:
    def a_checkpoint(driver: Driver) -> None:
        driver.checkpoint()

    found = stage.run(
        3,
        (after("step", step=2), lambda driver: driver.pause()),
        (after("paused"), a_checkpoint),
        (after("checkpoint"), signal_to(1, signal.SIGKILL)),
        (after("formed", 2), lambda driver: driver.resume()),
        (after("step", step=20), lambda driver: driver.pause()),
        steps=20,
        min_workers=2,
        max_worker_losses=2,
        start_backoff_s=0.1,
    )
    require(found, "pause", "paused", "resume", "pause_refused")


def gone_back_because_of_a_number(stage: Stage) -> None:
    found = stage.run(
        2, task=Diverging([first_sample_of(4)]), data=Tokens(), steps=8, save_every=2, on_non_finite="rewind"
    )
    require(found, "rewind")


def steps_left_out(stage: Stage) -> None:
    found = stage.run(
        3,
        faults=[kill(1, 5, "backward")],
        task=Diverging([first_sample_of(3), first_sample_of(6, 1)]),
        data=Tokens(),
        steps=9,
        on_non_finite="skip",
        min_workers=1,
        max_worker_losses=1,
    )
    require(found, "step_skipped", "recovery")


def asked_for(stage: Stage) -> None:
    """Another learning rate, and two ways back: with the data again, and past it."""
    found = stage.run(
        3,
        (after("step", step=2), lambda driver: driver.set_learning_rate(0.25)),
        (after("checkpoint", step=6), lambda driver: driver.rewind(2)),
        (after("rewind"), lambda driver: driver.rewind(1)),  # no checkpoint: refused
        (after("rewind_refused"), lambda driver: driver.set_learning_rate(0.5)),
        (after("checkpoint", step=12), lambda driver: driver.rewind(8, skip_data=True)),
        (after("rewind", 2), lambda driver: driver.set_learning_rate(2.0)),
        (after("step", step=24), lambda driver: driver.set_learning_rate(3.0)),
        steps=24,
        save_every=2,
        data=Slow(0.02),
        metadata={"batch": {"global_batch_size": 8, "microbatch_size": 2, "seed": 5}, "reduction": "exact"},
    )
    require(found, "learning_rate", "learning_rate_refused", "rewind", "rewind_refused")


def weights_asked_for(stage: Stage) -> None:
    """Other weights of a mixture, a way back that undoes them, and others that come too late."""
    sources = {"one": Slow(0.02), "two": Slow(0.02)}
    found = stage.run(
        2,
        (after("step", step=2), lambda driver: driver.set_mixture_weights({"two": 1.0})),
        (after("checkpoint", step=8), lambda driver: driver.rewind(2)),
        (after("rewind"), lambda driver: driver.set_mixture_weights({"one": 1.0, "two": 2.0})),
        (after("step", step=14), lambda driver: driver.set_mixture_weights({"one": 1.0})),
        steps=14,
        save_every=2,
        data=rs.Mixture(sources, {"one": 3, "two": 1}),
        metadata={"batch": {"global_batch_size": 8, "microbatch_size": 2, "seed": 5}, "reduction": "exact"},
    )
    require(found, "mixture_weights", "mixture_weights_refused", "rewind")


def saves_that_fail(stage: Stage) -> None:
    for step in (1, 2, 3, 4, 12):
        (stage.folder / f"fail{step}").touch()

    def hold_up(driver: Driver) -> None:
        (stage.folder / "wait").touch()

    def let_go(driver: Driver) -> None:
        (stage.folder / "go").touch()

    found = stage.run(
        2,
        (after("checkpoint"), hold_up),
        (after("checkpoint_late", 2), let_go),
        task=Storing(stage.folder),
        steps=12,
        save_every=1,
        last_save_backoff_s=0.1,
        data=Slow(0.04),
    )
    require(found, "checkpoint", "checkpoint_late", "checkpoint_failed", "checkpoints_failing")


class TakesNoEntries(StorageAround):
    """The storage of a driver that takes no journal entries while it is told so."""

    is_full = False

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self.is_full and key.startswith(f"{JOURNAL}/"):
            raise StorageError("no space left on device")
        return super().put_if_absent(key, data)


def storage_that_takes_no_entries(stage: Stage) -> None:
    storage = TakesNoEntries(open_storage(stage.url))

    def fill(driver: Driver) -> None:
        storage.is_full = True

    def free(driver: Driver) -> None:
        storage.is_full = False

    found = stage.run(
        2,
        (after("step", step=2), fill),
        (after("storage_failing"), free),
        storage=storage,
        steps=200,
        save_every=10,
        data=Slow(0.02),
    )
    require(found, "storage_failing", "storage_back")


def storage_that_takes_no_entries_for_too_long(stage: Stage) -> None:
    """The oldest entries are dropped, events too: the report has how many, and the replay ends there."""
    storage, failing = TakesNoEntries(open_storage(stage.url)), [0]

    def fill(driver: Driver) -> None:
        storage.is_full = True

    def free(driver: Driver) -> None:
        failing[0] = driver._recorder.num_dropped
        storage.is_full = False

    found = stage.run(
        2,
        (after("step", step=2), fill),
        (after("step", step=60), free),
        storage=storage,
        steps=100,
        save_every=40,
        data=Slow(0.02),
        on_storage={"backlog_bytes": 1 << 14},
    )
    assert failing[0] > 0
    require(found, "storage_failing", "storage_back")


def gcs_that_comes_back(stage: Stage) -> None:
    """And a limit of Ray's that leaves too little time for a checkpoint."""

    def found(silent_s: float, limit_s: float) -> Act:
        def act(driver: Driver) -> None:
            health = GcsHealth(silent_s=silent_s, limit_s=limit_s, leased=True)
            driver._gcs._health = lambda: health  # workers of this machine have no GCS

        return act

    run = stage.run(
        2,
        (after("step", step=2), found(6.0, 60.0)),
        (after("gcs_lost"), found(0.0, 60.0)),
        (after("gcs_back"), found(0.0, 10.0)),
        steps=60,
        save_every=10,
        data=Slow(0.02),
    )
    require(run, "gcs_lost", "gcs_back", "gcs_limit")


class FailsToCommit:
    """The storage of a driver that cannot claim its first commit."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.failed = False

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if b'"kind":"commit"' in data and not self.failed:
            self.failed = True
            raise StorageError("the claim could not be written")
        return self._storage.put_if_absent(key, data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


def without_a_last_checkpoint(stage: Stage) -> None:
    """And the first one cannot be committed."""
    storage = FailsToCommit(open_storage(stage.url))
    found = stage.run(
        2,
        steps=10,
        save_every=4,
        save_at_end=False,
        storage=storage,  # type: ignore[arg-type]  # has all methods
    )
    require(found, "checkpoint_failed", "checkpoint", "finished")


def parity(stage: Stage) -> None:
    found = stage.run(
        6,
        faults=[kill(2, 3, "backward"), kill(4, 6, "apply"), kill(5, 8, "snapshot")],
        engine=rs.EngineConfig(redundancy=rs.Redundancy(parity=(2, 1))),
        steps=10,
        save_every=4,
        min_workers=1,
        max_worker_losses=5,
        data=Slow(0.02),
    )
    assert any(str(one.get("redundancy", "")).startswith("parity") for one in found.of("generation"))


def shard_groups(stage: Stage) -> None:
    def groups_of(shards: int, tensor: int = 1) -> Act:
        grouping = Grouping(shards=shards, least_shards=shards, num_microbatches=4, tensor=tensor)
        return lambda driver: driver.reshard(grouping)

    found = stage.run(
        4,
        (after("step", step=10), groups_of(1)),
        (after("reshard", 1), groups_of(2, 8)),
        (after("reshard_refused", 1), lambda driver: driver.reshard(None)),
        faults=[kill(1, 4, "backward")],
        groups=2,
        steps=30,
        min_workers=1,
        max_worker_losses=2,
        data=Slow(0.02),
        prepare_within_s=20.0,
    )
    require(found, "reshard", "reshard_refused", "recovery")


def a_preparation_that_fails(stage: Stage) -> None:
    def other_groups(driver: Driver) -> None:
        driver.reshard(Grouping(shards=1, least_shards=1, num_microbatches=4, tensor=1))

    first = dict.fromkeys(range(3), fail_beside)
    found = stage.run(3, (after("step", step=2), other_groups), first=first, steps=12, min_workers=1)
    require(found, "preparation_failed", "reshard")


def killed_driver_resumed(stage: Stage) -> None:
    """Twice: the first dies, the second finds the newest checkpoint damaged, and is stopped; the third goes on."""

    def die(driver: Driver) -> None:
        raise Died

    stage.run(3, (after("step", step=9), die), steps=24, save_every=2, data=Slow(0.02), expect=Died)
    newest = max(int(path.name.split("-")[1]) for path in Path(stage.url, "checkpoints").glob("step-*"))
    for step in range(newest, 0, -1):
        with suppress(StopIteration):
            damage(stage.url, step)
            break
    found = stage.run(
        2,
        (after("step", step=14), lambda driver: driver.stop(checkpoint_within_s=60.0)),
        steps=24,
        save_every=4,
        data=Slow(0.02),
        resumed=True,
    )
    require(found, "checkpoint_skipped", "stopped")
    stage.run(4, steps=24, resumed=True)


def another_processor_is_refused(stage: Stage) -> None:
    found = stage.run(
        3,
        faults=[kill(1, 2, "backward")],
        nodes={3: "node-b", 4: "node-b"},
        first={3: be_another_processor, 4: be_another_processor, 5: fail_to_start},
        steps=120,
        min_workers=1,
        max_worker_losses=2,
        max_node_failures=1,
        max_start_failures=9,
        start_backoff_s=0.2,
        data=Slow(0.02),
    )
    require(found, "worker_refused", "start_failed", "node_avoided")


def other_bits_are_accepted(stage: Stage) -> None:
    """Stopped, refused on machines with another processor, and gone on with there by the user's word."""

    def stop(driver: Driver) -> None:
        driver.stop(checkpoint_within_s=60.0)

    elsewhere = dict.fromkeys(range(MOST_WORKERS), be_another_processor)
    stage.run(2, (after("step", step=4), stop), steps=16, data=Slow(0.02))
    refused = stage.run(2, steps=16, first=elsewhere, resumed=True, expect=InexactError)
    require(refused, "failed")
    found = stage.run(2, steps=16, first=elsewhere, resumed=True, accept_arithmetic=True)
    require(found, "arithmetic", "finished")


def too_few_workers(stage: Stage) -> None:
    """Waits for workers that do not start, and fails."""
    found = stage.run(
        2,
        first=dict.fromkeys(range(1, 9), fail_to_start),
        max_start_failures=3,
        start_backoff_s=6.0,
        expect=RunFailed,
    )
    require(found, "waiting", "start_failed", "failed")


def a_range_that_is_not_filled(stage: Stage) -> None:
    """Two of at most three workers train, and the third never starts."""

    def be_full(driver: Driver) -> None:
        text = "Each worker needs 1 CPU (the cluster has 2, 0 free)."
        setattr(driver._launcher, "describe_shortage", lambda wanted=None: text if wanted else "")  # noqa: B010

    def stop(driver: Driver) -> None:
        driver.stop(checkpoint_within_s=60.0)

    found = stage.run(
        3,
        (after("step", step=1), be_full),
        (after("below_maximum"), stop),
        first={2: never_start},
        steps=1000,
        data=Slow(0.02),
        min_workers=2,
        join_wait_s=0.1,
    )
    require(found, "below_maximum", "stopped")


def never_start() -> None:
    """The first act of a worker: it waits until it is killed."""
    time.sleep(3600.0)


def wrong_numbers(stage: Stage) -> None:
    corrupt = Fault(worker=WorkerId(1), step=5, phase="backward", kind="corrupt", every=True)
    found = stage.run(
        3,
        faults=[corrupt],
        steps=10,
        save_every=2,
        engine=rs.EngineConfig(audit_every_steps=2),
        min_workers=1,
        max_worker_losses=3,
        data=Slow(0.02),
    )
    require(found, "audit", "corruption")


def a_joiner_that_computes_wrong_numbers(stage: Stage) -> None:
    corrupt = Fault(worker=WorkerId(2), step=1, phase="backward", kind="corrupt", every=True)
    found = stage.run(
        2,
        faults=[kill(1, 3, "agree"), corrupt],
        steps=20,
        nodes={2: "node-b"},
        min_workers=1,
        max_worker_losses=2,
        data=Slow(0.05),
    )
    require(found, "proof_failed", "worker_lost")


def a_slow_worker_is_replaced(stage: Stage) -> None:
    found = stage.run(
        3,
        data=SlowInOneWorker(stage.folder, seconds=0.2),
        steps=30,
        min_workers=2,
        look_around_s=0.5,
        evict_slower_than=3.0,
    )
    require(found, "straggler", "worker_leaving")


def drained(stage: Stage) -> None:
    found = stage.run(
        4,
        (after("step", step=2), lambda driver: driver.drain("node-x", 5.0)),
        (after("drain_refused"), lambda driver: driver.drain("node-b", 20.0)),
        nodes={1: "node-b", 3: "node-b", 5: "node-b"},
        steps=40,
        min_workers=1,
        data=Slow(0.02),
    )
    require(found, "drain", "drain_refused", "worker_left", "worker_refused")


def an_error_of_the_task(stage: Stage) -> None:
    raises = Fault(worker=WorkerId(0), step=3, phase="forward", kind="raise")
    found = stage.run(2, faults=[raises], steps=8, expect=TaskError)
    require(found, "failed")


def the_same_death_again(stage: Stage) -> None:
    task = Dies(stage.folder, leave, times=9)
    found = stage.run(
        4, steps=8, task=task, data=samples(), min_workers=1, max_worker_losses=9, max_same_deaths=3, expect=StepFailed
    )
    require(found, "worker_died", "repeated_death", "failed")


def in_chaos(stage: Stage) -> None:
    plan = FaultPlan(faults=(), folder=str(stage.folder), listens=True)
    trainer = rs.ElasticTrainer(
        task=GptTask(),
        data=Slow(0.01),
        batch=rs.BatchConfig(global_batch_size=8, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=(1, 3)),
        run=rs.RunConfig(
            name="run",
            storage_path=str(stage.folder),
            max_steps=1_000_000,
            record_events=True,
            failure=rs.FailureConfig(progress_timeout_s=30.0, task_error_retries=10),
        ),
    )
    trainer.faults = plan
    run = trainer.start_with(ProcessLauncher)  # on this machine by its name: it is signalled from outside
    with Chaos(run, "kill:every=8s,slow:every=3s:seconds=0.3,raise:every=5s", plan=plan) as chaos:
        deadline = time.monotonic() + 2 * WAIT_S
        while {struck.kind for struck in chaos.struck} != {"kill", "slow", "raise"}:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    step = run.status().step
    while run.status().step < step + 3:
        time.sleep(0.1)
    run.stop(checkpoint=True)
    with suppress(RunFailed):
        run.wait(WAIT_S)


def parts_that_arrive_late(stage: Stage) -> None:
    """What takes a race of two saves: told to the machine, and recorded by the driver's own recorder."""
    run = training(2)
    run.hear(CheckpointRequested(request=1))
    run.trained(1, asked=True)
    run.trained(2, saves=True)
    run.all_saved(2)
    run.all_saved(1)
    run.committed(2)
    run.hear(Overtaken(generation=GenerationId(1), step=1, reason="StaleGeneration"))
    assert run.records("checkpoint_overtaken")
    recorded(stage.folder / "run", run)


def all_wait_for_each_other(stage: Stage) -> None:
    """What takes a bug of a collective's: told to the machine, and recorded by the driver's own recorder."""
    run = training(3, hang_timeout_s=5.0)
    run.trained(1)
    run.trained(2, late=True)  # the save that it waits for is one that the driver does not know of
    run.waiting = frozenset(run.state.members)
    run.wait(60.0)
    assert [fields for fields in run.records("stuck") if "worker" not in fields]
    assert run.records("checkpoint_late") == [{"step": 2}]
    recorded(stage.folder / "run", run)


def verdicts_on_links_and_nodes(stage: Stage) -> None:
    """What takes several nodes and hours: told to the machine, and recorded by the driver's own recorder."""
    run = on("aabb", min_workers=1, max_node_failures=1, node_failure_window_s=50.0, hang_timeout_s=200.0)
    cut(run, "aabb", "a", "b")
    break_off(run)
    run.formed()
    run.trained(3)
    run.apart.clear()
    run.wait(31.0)
    run.lost(2)  # on node b, which is avoided from now on
    run.hear(NodeLost(node_id="b", host="host b", reason="it does not answer"))
    run.wait(20.0)
    run.hear(NodeBack(node_id="b", host="host b"))
    run.wait(31.0)
    for kind in ("links_broken", "links_mended", "node_avoided", "node_lost", "node_back", "node_allowed"):
        assert len(run.records(kind)) == 1, kind
    recorded(stage.folder / "run", run)


def lost_when_the_others_had_formed(stage: Stage) -> None:
    """What takes a loss within milliseconds, and then another owner of the run: told to the machine, and recorded by
    the driver's own recorder."""
    run = Run(min_workers=2, max_workers=3, max_worker_losses=3)
    run.ready(0, 1, 2)
    run.formed(0, 2)
    assert [command for command in run.lost(1) if isinstance(command, AskReport)]
    run.stopped(0, StopReason.BOUNDARY, 0)
    run.stopped(2, StopReason.BOUNDARY, 0)
    run.formed()
    run.trained(1)
    run.hear(LeadershipLost(reason="another driver, 'd2', owns the run"))
    assert run.state.phase is Phase.OVER
    recorded(stage.folder / "run", run)


def tensor_parallel_groups(stage: Stage) -> None:
    """What takes a model that can be cut so: told to the machine, and recorded by the driver's own recorder."""
    run = training(4, step=2, min_workers=2)
    run.hear(ReshardRequested(grouping=in_pairs()))
    stop_at_boundary(run, 3)
    run.formed()
    run.hear(ReshardRequested(grouping=None))
    stop_at_boundary(run, 4)
    run.formed()
    assert [fields["tensor_parallel_degree"] for fields in run.records("reshard")] == [2, 1]
    recorded(stage.folder / "run", run)


def taken_over(stage: Stage) -> None:
    """On Ray: a driver is killed, and the next one takes its workers."""
    _followed(stage, workers=2, orphan_wait_s=60.0)


def orphaned(stage: Stage) -> None:
    """On Ray: a driver is killed, its workers write a last checkpoint and end, and the next one goes on from it."""
    _followed(stage, workers=3, orphan_wait_s=1.0)


def _followed(stage: Stage, *, workers: int, orphan_wait_s: float) -> None:
    import ray

    from raysharded.display.raylet_output import quiet_raylet
    from raysharded.ray_backend.cluster import start_local
    from tests.ray.driving import DriverProcess, trainer

    stays = orphan_wait_s > 10
    with quiet_raylet():
        start_local(num_cpus=8)
        try:
            address = str(ray.get_runtime_context().gcs_address)
            first = DriverProcess(stage.folder, workers, address, orphan_wait_s=orphan_wait_s)
            first.wait_for_step(3)
            first.process.kill()
            first.process.wait()
            deadline = time.monotonic() + WAIT_S
            while not stays and any(Path(f"/proc/{pid}").exists() for pid in first.pids):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            trainer(stage.folder, 2).fit()
        finally:
            ray.shutdown()
    (stage.folder / "driven").rename(stage.folder / "run")


RUNS: dict[str, Callable[[Stage], None]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        killed_in_every_phase,
        two_killed_at_once,
        hanging,
        who_alone_holds_a_shard_is_waited_for,
        leaving,
        without_mirrors_one_leaves_after_a_checkpoint,
        resized,
        paused,
        gone_back_because_of_a_number,
        steps_left_out,
        asked_for,
        weights_asked_for,
        saves_that_fail,
        storage_that_takes_no_entries,
        storage_that_takes_no_entries_for_too_long,
        gcs_that_comes_back,
        without_a_last_checkpoint,
        parity,
        shard_groups,
        a_preparation_that_fails,
        killed_driver_resumed,
        another_processor_is_refused,
        other_bits_are_accepted,
        too_few_workers,
        a_range_that_is_not_filled,
        wrong_numbers,
        a_joiner_that_computes_wrong_numbers,
        a_slow_worker_is_replaced,
        drained,
        an_error_of_the_task,
        the_same_death_again,
        in_chaos,
        parts_that_arrive_late,
        all_wait_for_each_other,
        verdicts_on_links_and_nodes,
        lost_when_the_others_had_formed,
        tensor_parallel_groups,
        taken_over,
        orphaned,
    )
}


# -- what is kept of them --


def scrubbed(segment: bytes, folder: Path) -> bytes:
    """A segment without anything of this machine: as if the run had been elsewhere."""
    text = segment.decode()
    for path, instead in (
        (folder, "/runs"),
        (REPOSITORY, "/home/somebody/raysharded"),
        (Path(sys.prefix), "/home/somebody/venv"),
        (Path(sys.base_prefix), "/usr"),
    ):
        text = text.replace(json.dumps(str(path))[1:-1], instead)
    text = re.sub(rf"\b{re.escape(platform.node())}\b", NODES[0], text)
    text = re.sub(r"\b(?!127\.)\d+\.\d+\.\d+\.\d+\b", "10.0.0.1", text)
    return text.encode()


def record(name: str) -> None:
    """Make a run, check that it replays, and keep it."""
    with tempfile.TemporaryDirectory(prefix="recorded") as made:
        folder = Path(made)
        RUNS[name](Stage(folder=folder))
        segments = {
            f"{JOURNAL}/{path.name}": scrubbed(path.read_bytes(), folder)
            for path in sorted((folder / "run" / JOURNAL).iterdir())
        }
    recordings.pack(name, segments)


def render(name: str) -> None:
    """Keep what today's readers make of a recording; it must replay without a difference."""
    with tempfile.TemporaryDirectory() as made:
        run = recordings.unpack(name, Path(made))
        replays = load(str(run))  # not those of the process: the recording may be new
        differences = [difference for replay in replays for difference in replay.differences]
        assert not differences, "\n".join([name, *differences])
        recordings.keep_rendering(name, recordings.rendering(run, replays))


def render_journals() -> None:
    """The same, of the journals of earlier versions, which are never written again."""
    for name in recordings.journal_names():
        text = recordings.rendering(recordings.JOURNALS / name)
        recordings.rendering_of_journal(name).write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*RUNS, []], help=f"of {', '.join(RUNS)}")
    parser.add_argument("--render", action="store_true", help="keep the recordings, and what is made of them anew")
    given = parser.parse_args(arguments)
    if given.render:
        render_journals()
    for name in given.names or RUNS:
        began = time.monotonic()
        if not given.render:
            record(name)
        render(name)
        sys.stdout.write(f"{name}: {time.monotonic() - began:.1f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    from tests.golden.record_runs import main as imported_main  # so that the classes have one name in every process

    imported_main()

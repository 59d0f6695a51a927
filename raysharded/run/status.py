"""A run's status: from its storage, and from its driver in the driver's process.

No file shows that Ray restarts a run's driver.
"""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from typing import TYPE_CHECKING

from raysharded.errors import ClusterError, StorageError
from raysharded.run.results import Status

if TYPE_CHECKING:
    from raysharded.checkpoint import Storage
    from raysharded.driver.driver import Driver
    from raysharded.report.overview import RunOverview
    from raysharded.report.recent import Recent


def stored_status(run: RunOverview, recent: Recent | None = None) -> Status:
    """The status of a run of which an overview was made; without `recent`, its members and incidents stay unknown."""
    from raysharded.report.live.follow import OVER

    starting = recent.starting if recent else None
    members = None if run.state == "new" or starting else recent  # they are an earlier driver's
    if run.state in ("new", *OVER):
        starting = None
    return Status(
        phase=run.state,
        step=run.step or 0,
        max_steps=run.max_steps or 0,
        workers=members.members if members else (),
        pids=members.pids if members else {},
        nodes=members.nodes if members else {},
        name=run.name,
        url=run.url,
        driver=run.driver,
        started_at=run.driver_since,
        loss=run.loss,
        losses=None,
        checkpoint_step=run.checkpoint_step,
        state=run.state,
        num_workers=run.workers,
        num_ready=starting.ready if starting else None,
        num_needed=starting.needed if starting else None,
        missing=members.below_maximum if members and run.state in ("running", "silent") else "",
        generation=members.generation if members else None,
        driver_pid=run.driver_pid,
        driver_node=run.driver_node,
        checkpoint_at=run.checkpoint_at,
        newest_entry_at=run.newest_entry_at,
        num_segments=run.num_segments,
        step_s=recent.step_s if recent else None,
        error=run.error,
        incidents=recent.incidents if recent else (),
    )


def with_stored_best(status: Status, run: RunOverview, storage: Storage) -> Status:
    """The status with the run's best checkpoint. Unless the run keeps the best, nothing is read."""
    if not run.keeps_best:
        return status
    from raysharded.checkpoint import signing_key_from_environment
    from raysharded.run.outcome import best_of

    return replace(status, best_checkpoint=best_of(storage, status.url, key=signing_key_from_environment()))


def of_failed_start(status: Status, url: str) -> Status:
    """The status of a start that ended before a driver led the run, with the progress of the run that is there.

    Unchanged if there is none, or if it cannot be read.
    """
    from raysharded.report.loader import open_run
    from raysharded.report.overview import look

    try:
        (found,) = look([open_run(url)], pause=lambda _: None)
    except StorageError:
        return status
    return replace(
        status,
        step=found.step or 0,
        max_steps=found.max_steps or status.max_steps,
        loss=found.loss,
        checkpoint_step=found.checkpoint_step,
        checkpoint_at=found.checkpoint_at,
    )


def with_restart(run: RunOverview) -> RunOverview:
    """The overview, with the state `restarting` if Ray restarts the run's driver actor.

    Queries the Ray cluster that is found, and only if the run lost such a driver; otherwise it loads no Ray.
    """
    if not run.lost_actor or not has_cluster():
        return run
    from raysharded.ray_backend.adoption import where
    from raysharded.ray_backend.peers import host_name, host_of

    if host_of(host_name(run.name, run.url)) is not None:
        return replace(run, state="restarting", lost_actor=False)
    return replace(run, lost_actor=run.cluster != where()[0])  # its own cluster no longer has it


def has_cluster() -> bool:
    """Whether a Ray cluster answers, in the places where a run would find one."""
    from raysharded.ray_backend import cluster

    try:
        return cluster.find_cluster(log_to_driver=False)
    except ClusterError:
        return False


def with_driver(status: Status, driver: Driver, *, is_over: bool, started_at: float, error: str) -> Status:
    """The status with all that the driver knows.

    `started_at`: start time of the driver, in seconds since 1970. `error`: the one that the run failed with, or empty.
    """
    state = driver.state
    ready = {int(worker): facts for worker, facts in state.facts.items() if worker in state.ready}
    seen = {int(worker): one for worker, one in state.step_times.newest.items() if worker in state.members}
    loss = state.measured.get("loss")
    return replace(
        status,
        phase="over" if is_over else state.phase.value,
        error=error,
        warnings=driver.warnings(),
        stop_requested=state.stop_requested and not is_over,
        step=state.step,
        workers=tuple(map(int, state.members)),
        num_workers=len(state.members),
        num_ready=None if state.members or is_over else len(state.ready),
        num_needed=None if state.members or is_over else state.limits.min_workers,
        missing="" if is_over else driver.shortages.below_maximum(state),
        generation=int(state.generation) if state.members else None,
        pids={worker: facts.pid for worker, facts in ready.items()},
        nodes={worker: facts.node for worker, facts in ready.items()},
        mesh=str(state.mesh) if state.members else "",
        driver=f"driver {state.driver} (process {os.getpid()} on {platform.node()})",
        driver_pid=os.getpid(),
        driver_node=platform.node(),
        started_at=started_at,
        loss=None if loss is None else float(loss),
        losses=state.losses,
        checkpoint_step=state.checkpoint.step if state.checkpoint else None,
        doing={worker: one.phase for worker, one in seen.items()},
        busy_s={worker: sum(one.busy.values()) for worker, one in seen.items() if one.num_steps},
    )

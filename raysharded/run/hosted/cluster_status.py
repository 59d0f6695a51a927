"""A run's status with what its Ray cluster knows, and its storage does not.

No file shows that Ray restarts a run's driver, that a driver cannot write, or that workers wait for one.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from raysharded.run.status import has_cluster, stored_status, with_restart, with_stored_best

if TYPE_CHECKING:
    from raysharded.errors import StorageError
    from raysharded.report.overview import RunOverview
    from raysharded.run.results import Status

_LOOK_S = 20.0
"""Age of the newest entry, by this machine's clock, from which on the driver is queried."""
_ANSWER_S = 5.0
_OVER = ("finished", "stopped", "failed", "damaged")


def status_at(url: str) -> Status:
    """The status of the run at a URL, with its best checkpoint. Raises StorageError if there is none."""
    from raysharded.report.loader import open_run
    from raysharded.report.overview import look
    from raysharded.report.recent import read_recent

    storage = open_run(url)
    (found,) = look([storage])
    run, status = complete(found, stored_status(found, read_recent(storage)))
    return with_stored_best(status, run, storage)


def without_storage(url: str, error: StorageError) -> tuple[RunOverview, Status] | None:
    """A run whose storage shows no run, or cannot be read, as its driver actor knows it; None if it has none.

    A share is unmounted, for example, and the run trains on. `error`, that of storage, is among the warnings.
    """
    from raysharded.checkpoint import open_storage
    from raysharded.ray_backend.peers import host_name, host_of
    from raysharded.report.overview import RunOverview
    from raysharded.run.hosted.registry import of_another_version, status_of
    from raysharded.run.results import Status

    url = open_storage(url).url
    name = os.path.basename(url.partition("?")[0].rstrip("/"))
    host = host_of(host_name(name, url)) if has_cluster() else None
    if host is None or of_another_version(name, url):
        return None
    answer = status_of(host, _ANSWER_S) or Status(phase="", state="new", step=0, max_steps=0, workers=())
    state = "restarting" if answer.state == "new" else answer.state  # it starts again, or waits for storage
    run = RunOverview(
        url=url,
        name=name,
        state=state,  # type: ignore[arg-type]  # a driver reports one of these
        driver=answer.driver,
        error=answer.error,
        step=answer.step or None,
        max_steps=answer.max_steps or None,
        loss=answer.loss,
        workers=answer.num_workers,
        checkpoint_step=answer.checkpoint_step,
        checkpoint_at=None,
        newest_entry_at=None,
        num_segments=0,
        driver_is_actor=True,
    )
    warnings = (*answer.warnings, f"its storage does not show it: {error}")
    return run, replace(answer, name=name, url=url, state=state, phase=state, warnings=warnings)


def complete(run: RunOverview, status: Status, *, ask: bool = False) -> tuple[RunOverview, Status]:
    """Both with what the run's driver actor answers, or with the workers that wait for a driver.

    Queries the Ray cluster that is found if `ask`, or if storage shows no entry for a while, or the loss of the
    driver. Without an answer both stay as they are.
    """
    from raysharded.report.state_meaning import waiting_text

    run = with_restart(run)
    asks = run.driver_is_actor and (_is_silent(run) or (ask and run.state not in _OVER))
    if asks and has_cluster() and (answer := _driver_s_answer(run)) is not None:
        return _with_answer(run, status, answer)
    if run.state == "ended" and run.cluster and has_cluster():
        from raysharded.ray_backend.peers import waiting_workers

        if (waiting := waiting_workers(run.url)) is not None:
            run = replace(run, waiting=waiting)
            status = replace(status, warnings=(*status.warnings, waiting_text(waiting)))
    return run, replace(status, state=run.state, phase=run.state)


def _is_silent(run: RunOverview) -> bool:
    age_s = 0.0 if run.newest_entry_at is None else time.time() - run.newest_entry_at
    return run.state in ("silent", "restarting", "ended") or (run.state == "running" and age_s > _LOOK_S)


def _driver_s_answer(run: RunOverview) -> Status | None:
    from raysharded.ray_backend.peers import host_name, host_of
    from raysharded.run.hosted.registry import of_another_version, status_of

    host = host_of(host_name(run.name, run.url))
    if host is None or of_another_version(run.name, run.url):
        return None
    return status_of(host, _ANSWER_S)


def _with_answer(run: RunOverview, status: Status, answer: Status) -> tuple[RunOverview, Status]:
    if answer.state == "new":  # the actor has been restarted, and does not lead the run yet
        return run, replace(status, state=run.state, phase=run.state, warnings=answer.warnings)
    run = replace(
        run,
        state=answer.state,  # type: ignore[arg-type]  # a driver reports one of these
        step=answer.step,
        loss=run.loss if answer.loss is None else answer.loss,
        workers=answer.num_workers,
        driver=answer.driver or run.driver,
        error=answer.error,
        lost_actor=False,
    )
    return run, replace(
        answer,
        incidents=status.incidents,
        newest_entry_at=status.newest_entry_at,
        num_segments=status.num_segments,
        checkpoint_at=status.checkpoint_at,
        checkpoint_step=status.checkpoint_step if answer.checkpoint_step is None else answer.checkpoint_step,
        step_s=status.step_s,
        loss=run.loss,
    )

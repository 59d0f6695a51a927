"""A run's status from its storage alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysharded.run.results import Status

if TYPE_CHECKING:
    from raysharded.report.overview import RunOverview
    from raysharded.report.recent import Recent


def stored_status(run: RunOverview, recent: Recent | None = None) -> Status:
    """The status of a run of which an overview was made; without `recent`, its members and incidents stay unknown."""
    return Status(
        phase=run.state,
        step=run.step or 0,
        max_steps=run.max_steps or 0,
        workers=recent.members if recent else (),
        pids=recent.pids if recent else {},
        nodes=recent.nodes if recent else {},
        name=run.name,
        url=run.url,
        driver=run.driver,
        started_at=run.driver_since,
        loss=run.loss,
        losses=None,
        checkpoint_step=run.checkpoint_step,
        state=run.state,
        num_workers=run.workers,
        generation=recent.generation if recent else None,
        driver_pid=run.driver_pid,
        driver_node=run.driver_node,
        checkpoint_at=run.checkpoint_at,
        newest_entry_at=run.newest_entry_at,
        num_segments=run.num_segments,
        step_s=recent.step_s if recent else None,
        error=run.error,
        incidents=recent.incidents if recent else (),
    )


def status_at(url: str) -> Status:
    """The status of the run at a URL. Raises StorageError if there is none."""
    from raysharded.report.loader import open_run
    from raysharded.report.overview import look
    from raysharded.report.recent import read_recent
    from raysharded.run.restart import with_restart

    storage = open_run(url)
    (found,) = look([storage])
    return stored_status(with_restart(found), read_recent(storage))

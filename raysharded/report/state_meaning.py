"""The state of a run in words: its meaning, and how to resume."""

from __future__ import annotations

from dataclasses import replace

from raysharded.display.quantities import count, duration
from raysharded.report.overview import RunOverview, State

_ALWAYS: dict[State, str] = {
    "new": "it is starting: its driver has written nothing yet",
    "running": "its driver is at work",
    "paused": "its workers stand still until `raysharded resume`",
    "silent": "its driver gave no sign of life; it may still be at work",
    "restarting": "its driver was lost; Ray restarts it, and the run continues by itself",
    "finished": "all its steps are done",
    "damaged": "the end of its journal, or another of its files, cannot be read",
}


def meaning(run: RunOverview) -> str:
    """The meaning of a run's state; for one that is over, also the place where the next start resumes it."""
    if run.before_start is not None:
        before = replace(run, state=run.before_start, before_start=None)
        return f"its newest start failed before a driver led it. Before that: {meaning(before)}"
    if run.state == "new" and run.step:
        return "a driver resumes it, or takes it over, and has written nothing yet"
    if (always := _ALWAYS.get(run.state)) is not None:
        return always
    if run.waiting is not None:
        return f"its driver exited without a final entry after step {run.step or 0}; its workers wait for another one"
    if never_began(run):
        why = {"failed": "it failed", "stopped": "it was stopped"}.get(run.state, "its driver ended")
        return f"{why} before its first step, so nothing of it was trained. Started again, it begins {_begin(run)}"
    at = f"at step {run.step or 0}; the next fit() resumes {_begin(run)}"
    match run.state:
        case "failed":
            return f"it ended with an error {at}"
        case "stopped":
            return f"interrupted {at}" if run.interrupted else f"it was stopped {at}"
    if run.lost_actor:
        return (
            f"the process of its driver actor has exited. Ray restarts it if its cluster is up; otherwise it ended {at}"
        )
    return f"its driver exited without a final entry {at}"


def waiting_text(waiting: tuple[int, float]) -> str:
    """The sentence about workers that wait for a driver."""
    workers, wait_s = waiting
    return (
        f"{count(workers, 'worker')} {'keeps' if workers == 1 else 'keep'} the newest state in memory for another "
        f"{duration(wait_s)}: a start within that time continues from it. After that they write a checkpoint of it"
    )


def label(run: RunOverview) -> str:
    """The state as tables name it."""
    failed_to_start = run.state == "failed" and (run.before_start is not None or never_began(run))
    return "failed to start" if failed_to_start else run.state


def never_began(run: RunOverview) -> bool:
    """True for a run that is over and never did a step."""
    return run.state in ("ended", "stopped", "failed") and not run.step and run.loss is None and not run.checkpoint_step


def _begin(run: RunOverview) -> str:
    if run.checkpoint_step is not None:
        return f"from its checkpoint of step {run.checkpoint_step}"
    if run.fork_step is not None:
        return f"from step {run.fork_step} of the run that it is a fork of"
    return "from the start: it has no checkpoint" if not never_began(run) else "from the start"

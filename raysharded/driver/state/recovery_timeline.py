"""The timeline of a recovery, from the first sign of a loss to the first step done without it."""

from __future__ import annotations

from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Record
from raysharded.driver.state.state import Incident, State
from raysharded.ids import WorkerId
from raysharded.protocol.messages import StepReport


def found(state: State, at: float, *, lost: WorkerId | None = None, reason: str = "") -> Incident:
    """The incident after its first, or a further, sign."""
    incident = state.incident or Incident(
        found_at=at,
        lost=(),
        reasons=(),
        workers_before=len(state.members),
        step_before=state.step,
    )
    if lost is not None and lost not in incident.lost:
        incident = replace(incident, lost=(*incident.lost, lost), reasons=(*incident.reasons, reason))
    elif lost is None and reason:
        incident = replace(incident, reasons=(*incident.reasons, reason))
    return replace(incident, step_before=max(incident.step_before, state.step), decided_at=None, formed_at=None)


def stopped(incident: Incident | None, step: int, at: float) -> Incident | None:
    """Record that every survivor is free and has reported its holdings, and that `step` was done."""
    if incident is None:
        return None
    return replace(incident, stopped_at=at, step_before=max(incident.step_before, step))


def resumed(incident: Incident | None, step: int, source: str, at: float) -> Incident | None:
    """Record the step and source from which the next generation continues, and that its members are decided."""
    return None if incident is None else replace(incident, resume_step=step, source=source, decided_at=at)


def formed(incident: Incident | None, at: float) -> Incident | None:
    """Record that the next generation holds its state."""
    return None if incident is None else replace(incident, formed_at=at)


def after_pause(incident: Incident | None, at: float) -> Incident | None:
    """Restart the times of an incident when a paused run continues: the pause does not count."""
    return None if incident is None else replace(incident, found_at=at, stopped_at=at, decided_at=None, formed_at=None)


def over(incident: Incident, state: State, first: StepReport, at: float) -> Record:
    """Journal entry of a recovery; times are monotonic seconds of the driver. `wait_s` is there if it waited."""
    stopped_at = incident.stopped_at or incident.found_at
    decided_at = max(stopped_at, incident.decided_at or stopped_at)
    formed_at = max(decided_at, incident.formed_at or decided_at)
    waited = {"wait_s": decided_at - stopped_at} if decided_at > stopped_at else {}
    return Record(
        kind="recovery",
        fields={
            "lost": list(incident.lost),
            "reasons": list(incident.reasons),
            "workers_before": incident.workers_before,
            "workers_after": len(state.members),
            "found_at": incident.found_at,
            "abort_s": stopped_at - incident.found_at,
            **waited,
            "reshard_s": formed_at - decided_at,
            "first_step_s": at - formed_at,
            "total_s": at - incident.found_at,
            "steps_redone": max(0, incident.step_before - incident.resume_step),
            "source": incident.source,
            "resumed_after_step": incident.resume_step,
            "first_step_finished_at": first.finished_at,
        },
        durable=True,
    )

"""Steps that workers report. A handler of the machine."""

from __future__ import annotations

from collections.abc import Iterable

from raysharded.driver.checkpoints import saves
from raysharded.driver.rollback import corruption_rollback, non_finite
from raysharded.driver.state import recovery_timeline, step_watch
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, Outcome, Record
from raysharded.driver.state.state import Phase, State
from raysharded.driver.workers import failure_budget, proof_failures
from raysharded.protocol.messages import StepReport, Stopped


def is_new(state: State, report: StepReport) -> bool:
    """Whether `apply_reports` uses this report; others change nothing."""
    return report.generation == state.generation and report.step > state.step


def following(state: State, reports: tuple[StepReport, ...]) -> tuple[StepReport, ...]:
    """The reports, given in order, that follow the known steps without a gap."""
    found: list[StepReport] = []
    for report in reports:
        if is_new(state, report):
            if report.step != state.step + 1 + len(found):
                break
            found.append(report)
    return tuple(found)


def of_all(stops: Iterable[Stopped]) -> tuple[StepReport, ...]:
    """The reports of all these workers, in step order: one may report fewer steps than another."""
    by_step = {report.step: report for stopped in stops for report in stopped.reports}
    return tuple(by_step[step] for step in sorted(by_step))


def apply_reports(state: State, reports: tuple[StepReport, ...], at: float) -> Outcome:
    commands: list[Command] = []
    for report in reports:
        if not is_new(state, report):
            continue
        first = state.step == state.generation_start_step
        watch = step_watch.measured(state.watch, at - state.since, first=first)
        reached = max(state.reached, report.step)
        state = replace(state, step=report.step, reached=reached, since=at, watch=watch, idle_generations=0)
        if report.step >= state.losing_step:
            state = failure_budget.got_further(state)
        if report.step >= state.failing_step:
            state = replace(state, task_errors=0)
        commands.append(Record(kind="step", fields=report.fields()))
        if state.incident is not None and state.incident.formed_at is not None:  # else this step was before the loss
            commands.append(recovery_timeline.over(state.incident, state, report, at))
            state = replace(state, incident=None)
        state, more = non_finite.note_skipped(state, report)
        commands.extend(more)
        if state.phase is Phase.OVER:
            break
        state, more = corruption_rollback.note(proof_failures.note(state, report), report)
        commands.extend(more)
        state, more = saves.on_report(state, report, at)
        commands.extend(more)
        if state.phase is Phase.OVER:
            break
    return state, commands

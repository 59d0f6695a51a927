"""Proof of the first step by workers that join a run; culprits are removed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raysharded.driver.state import recovery_timeline
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, KillWorker, Outcome, Record, finish, prepend
from raysharded.driver.state.state import Phase, State
from raysharded.driver.workers import failure_budget
from raysharded.errors import InexactError
from raysharded.ids import WorkerId
from raysharded.protocol.messages import Corruption, StepReport
from raysharded.protocol.worker_launcher import WorkerLost


def newcomers(state: State, members: Sequence[WorkerId]) -> tuple[WorkerId, ...]:
    """Members that have not proven any step, if a proof is required."""
    return tuple(worker for worker in members if worker not in state.proven) if state.limits.proves_first_step else ()


def note(state: State, report: StepReport) -> State:
    """Handle a reported step: all members of its generation have proven themselves."""
    if not state.limits.proves_first_step or report.generation != state.generation:
        return state
    proven = state.proven.union(state.members)
    return state if proven == state.proven else replace(state, proven=proven)


def failed(state: State, corruption: Corruption, at: float) -> Outcome:
    """The state without the culprits, in which the step is computed again.

    At the start of a run, the run ends, because the correct result is unknown. It also ends if a step fails twice. A
    failure of newcomers alone, in a generation with proven workers, does not count for that.
    """
    at_start = not state.proven
    old = state.proven.intersection(state.members)
    is_of_newcomers = bool(old) and not old.intersection(corruption.culprits)
    fields = {**corruption.fields(), "nodes": [_node_of(state, worker) for worker in corruption.workers]}
    commands: list[Command] = [Record(kind="proof_failed", fields=fields, durable=True)]
    again = not is_of_newcomers and state.corrupted is not None and state.corrupted[0] == corruption.step
    if at_start or again:
        return prepend(finish(state, _error(state, corruption, again=again)), commands)
    state = replace(state, incident=recovery_timeline.found(state, at, reason=corruption.text()))
    if not is_of_newcomers:
        state = replace(state, corrupted=(corruption.step, corruption.text()))
    state, more = without_culprits(state, corruption, at)
    return state, [*commands, *more]


def without_culprits(state: State, corruption: Corruption, at: float) -> Outcome:
    """The state without culprits, each of which counts as lost; ends the run if those were too many."""
    commands: list[Command] = []
    for worker in corruption.culprits:
        if worker not in state.ready:
            continue
        reason = f"computed wrong numbers: {corruption.text()}"
        commands.append(KillWorker(worker=worker))
        state = replace(state, incident=recovery_timeline.found(state, at, lost=worker, reason=reason))
        state, more = failure_budget.count_loss(state, WorkerLost(worker=worker, reason=reason), at)
        commands.extend(more)
        if state.phase is Phase.OVER:
            break
    return state, commands


def _error(state: State, corruption: Corruption, *, again: bool) -> InexactError:
    of = f"microbatch {corruption.microbatches[0]}" if corruption.microbatches else "a microbatch"
    compared, suspects = _named(state, corruption.workers), _named(state, corruption.culprits)
    if len(corruption.workers) == 1:
        found = f"{compared} did not get the same {corruption.what} twice"
    else:
        found = f"of {compared}, not all got the same {corruption.what}"
        found += f"; by comparison it is {suspects}" if len(corruption.culprits) < len(corruption.workers) else ""
    before = f", again after it was computed anew because of: {(state.corrupted or (0, ''))[1]}" if again else ""
    return InexactError(
        f"step {corruption.step}: when {of} was computed a second time, to prove the first step, {found}{before}. If "
        "these run well elsewhere, the task's computation is not reproducible: look for randomness that "
        "torch.manual_seed does not set (a generator of the task's or the dataset's own), for time, and for state that "
        "forward, the loss or the dataset changes (counters, queues). If the task does compute the same everywhere, "
        "the machine does not: look at these nodes and their GPUs, and leave them out. "
        "EngineConfig(prove_first_step=False) goes on without the proof, "
        'EngineConfig(reduction="fast") without identical bits.'
    )


def _named(state: State, workers: Iterable[WorkerId]) -> str:
    """Names for people: each worker with its node and, if it has one, its GPU."""
    return " and ".join(f"worker {worker} on {_node_of(state, worker)}" for worker in workers)


def _node_of(state: State, worker: WorkerId) -> str:
    facts = state.facts.get(worker)
    if facts is None:
        return "?"
    return f"{facts.node} ({facts.device})" if facts.device else facts.node

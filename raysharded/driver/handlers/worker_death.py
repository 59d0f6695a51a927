"""Causes of workers' deaths, which follow their losses; the same death again and again ends the run.

A run that cannot get past a step because its own code ends the processes there is not helped by new workers. Deaths
from outside never count: kills and preemptions are what the run is made for.
"""

from __future__ import annotations

from collections.abc import Sequence

from raysharded.display.quantities import listing
from raysharded.driver.checkpoints import saves
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, Outcome, Record, prepend
from raysharded.driver.state.state import OwnDeath, State
from raysharded.driver.workers import device_failures
from raysharded.errors import StepFailed
from raysharded.ids import WorkerId
from raysharded.protocol.death import Death, DeathExplained


def on_explained(state: State, event: DeathExplained, at: float) -> Outcome:
    """Record what a worker died of; end the run if that was once too often the same."""
    worker, death = event.worker, event.death
    if not death.is_known:
        return state, []
    step = death.step or state.current_step
    host, node_id = _node(state, worker)
    fields = {
        "worker": worker,
        "node": host,
        "step": step,
        "phase": death.phase,
        "microbatch": death.microbatch,
        "samples": list(death.samples),
        "cause": death.cause,
        "status": death.status,
        "signal": death.signal,
        "out_of_memory": death.out_of_memory,
        "stderr": list(death.stderr),
        "stderr_file": death.stderr_file,
    }
    if death.gpu:
        fields["gpu"] = list(death.gpu)
    if death.gpu_is_broken:
        state = device_failures.remember_death(state, worker, death.generation)
    commands: list[Command] = [Record(kind="worker_died", fields=fields, durable=True)]
    state = _with_reason(state, worker, death)
    if not death.is_its_own or step <= state.step:  # of a step that was done since
        return state, commands
    own = OwnDeath(
        worker=worker,
        generation=death.generation,
        step=step,
        phase=death.phase,
        cause=death.cause,
        microbatch=death.microbatch,
        node_id=node_id,
    )
    state = replace(state, deaths=(*state.deaths, own))
    same = _same_as(state, own)
    if not same or state.ending is not None:
        return state, commands
    error = StepFailed(_verdict(state, same, death))
    fields = {
        "step": step,
        "phase": own.phase,
        "microbatch": _microbatch_of(same),
        "workers": sorted({one.worker for one in same}),
        "cause": own.cause,
        "reason": str(error),
    }
    return prepend(saves.end(state, error, at), [*commands, Record(kind="repeated_death", fields=fields, durable=True)])


def _with_reason(state: State, worker: WorkerId, death: Death) -> State:
    """The state with the cause in place of the reason that its incident was opened with."""
    incident = state.incident
    if incident is None or worker not in incident.lost:
        return state
    # reasons of lost workers are in their order, and others' come between
    before = incident.lost.index(worker)
    if len(incident.reasons) != len(incident.lost):
        return replace(state, incident=replace(incident, reasons=(*incident.reasons, f"worker {worker} {death.cause}")))
    reasons = (*incident.reasons[:before], f"its process {death.cause}", *incident.reasons[before + 1 :])
    return replace(state, incident=replace(incident, reasons=reasons))


def _same_as(state: State, own: OwnDeath) -> tuple[OwnDeath, ...]:
    """The deaths like this one, if they are of too many generations; empty otherwise, and if one node has them all
    although the run has others."""
    limit = state.limits.max_same_deaths
    same = tuple(one for one in state.deaths if (one.step, one.phase, one.cause) == (own.step, own.phase, own.cause))
    if limit is None or len({one.generation for one in same}) < limit:
        return ()
    nodes = {one.node_id for one in same}
    others = {state.facts[worker].node_id for worker in state.ready if worker in state.facts} - nodes
    return () if len(nodes) == 1 and others else same


def _microbatch_of(same: Sequence[OwnDeath]) -> int | None:
    """The microbatch that all of them were at; one without a microbatch computes another's."""
    found = {one.microbatch for one in same} - {None}
    return found.pop() if len(found) == 1 else None


def _verdict(state: State, same: Sequence[OwnDeath], newest: Death) -> str:
    first, microbatch = same[0], _microbatch_of(same)
    where = f"{first.phase or 'an unknown phase'} of step {first.step}"
    workers = listing([str(one) for one in sorted({one.worker for one in same})])
    generations = len({one.generation for one in same})
    text = (
        f"each of workers {workers}, in {generations} generations, {first.cause}, in {where}: the run cannot get past "
        f"it (FailureConfig.max_same_deaths={state.limits.max_same_deaths})."
    )
    if microbatch is not None:
        samples = f" (samples {listing([str(one) for one in newest.samples])} of the dataset)" if newest.samples else ""
        text += (
            f" All were at microbatch {microbatch} of the step{samples}. To skip it: let the dataset return something "
            "harmless for these indices, with the same length, and the loss give them no weight (Loss(total, 0)); then "
            "start the run again."
        )
    else:
        text += " Look for native code, or a call of os._exit, in that phase; then start the run again."
    if newest.stderr:
        lines = "\n".join(f"  {line}" for line in newest.stderr)
        text += f"\nThe last lines of the standard error of worker {same[-1].worker}"
        text += f" ({newest.stderr_file}):\n{lines}" if newest.stderr_file else f":\n{lines}"
    return text


def _node(state: State, worker: WorkerId) -> tuple[str, str]:
    """(host name, id) of a worker's node, as far as known."""
    facts = state.facts.get(worker)
    return (facts.node, facts.node_id) if facts is not None else ("", "")

"""Workers that are requested: started, admitted, refused, or failing to start. Handlers of the state machine."""

from __future__ import annotations

from collections.abc import Mapping

from raysharded import numerics
from raysharded.display.quantities import count
from raysharded.driver.state import arithmetic, broken_links, node_health
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, KillWorker, Outcome, Record, StartWorker, finish, prepend
from raysharded.driver.state.events import Ready
from raysharded.driver.state.persistent_map import with_entry, without
from raysharded.driver.state.state import Phase, State
from raysharded.driver.workers import device_failures, node_verdicts
from raysharded.errors import ClusterError, ConfigError, RayshardedError, RunFailed, TaskError
from raysharded.ids import WorkerId
from raysharded.protocol.messages import WorkerInfo
from raysharded.protocol.worker_launcher import WorkerLost


def start_workers(state: State, number: int, at: float) -> Outcome:
    """Request more workers."""
    commands: list[Command] = []
    starting = dict(state.starting)
    avoid = node_verdicts.to_avoid(state, at)
    for offset in range(number):
        worker = WorkerId(state.next_worker + offset)
        starting[worker] = at
        commands.append(StartWorker(worker=worker, avoid=avoid))
    return replace(state, starting=starting, next_worker=WorkerId(state.next_worker + number)), commands


def replace_missing(state: State, at: float) -> Outcome:
    """Request as many workers as are missing to the maximum and its spares, unless one just failed to start."""
    if at < state.start_after or state.ending is not None:
        return state, []
    missing = state.limits.max_workers + state.limits.spares - len(state.staying) - len(state.starting)
    return start_workers(state, missing, at) if missing > 0 else (state, [])


def admit(state: State, event: Ready, at: float) -> Outcome:
    """Admit a worker that has started, unless it would compute other bits than the run."""
    if event.worker not in state.starting:
        return state, [KillWorker(worker=event.worker, at_once=False)]
    starting = without(state.starting, event.worker)
    if node_health.is_avoided(state.nodes, event.facts.node_id):  # requested before its node was avoided
        drained = node_health.is_drained(state.nodes, event.facts.node_id)
        reason = "its node is drained" if drained else "its node failed too often"
        fields = {"worker": event.worker, "node": event.facts.node, "reason": reason}
        refused = Record(kind="worker_refused", fields=fields)
        return replace(state, starting=starting), [KillWorker(worker=event.worker, at_once=False), refused]
    if event.facts.device and device_failures.number(state, event.facts.device) >= device_failures.MOST_FAILURES:
        return _keep_from_others(replace(state, starting=starting), event, at)
    if state.num_samples not in (None, event.facts.num_samples):
        return finish(state, _other_data(state, event))
    if arithmetic.has_other_blocks(state, event.facts):
        return finish(state, _other_blocks(state, event))
    if arithmetic.has_other_contents(state, event.facts):
        return finish(state, _other_contents(event))
    lacks, differs = arithmetic.lacks(state, event.facts), arithmetic.differs(state, event.facts)
    if differs and not lacks and state.arithmetic_unmet:
        return _hold(state, event, at)
    if lacks or differs:
        return _refuse(replace(state, starting=starting), event, {**lacks, **differs}, at)
    state = replace(
        state,
        starting=starting,
        ready=state.ready | {event.worker},
        facts=with_entry(state.facts, event.worker, event.facts),
        links=broken_links.with_newcomer(
            state.links,
            event.worker,
            event.facts.node_id,
            {worker: state.facts[worker].node_id for worker in state.ready} if state.links.broken else {},
        ),
        nodes=node_health.seen(state.nodes, event.facts.node_id, event.facts.node),
        arithmetic=numerics.of_machine(event.facts.arithmetic) if state.arithmetic is None else state.arithmetic,
        arithmetic_unmet=False,
        num_samples=event.facts.num_samples,
        blocks=arithmetic.blocks_with(state, event.facts),
        contents=arithmetic.contents_with(state.contents, event.facts),
        last_ready_at=at,
        start_failures=0,
        start_after=0.0,
    )
    facts = event.facts
    fields = {
        "worker": event.worker,
        "pid": facts.pid,
        "node": facts.node,
        "node_id": facts.node_id,
        "start_cpu_s": facts.start_cpu_s,
    }
    ready: list[Command] = [Record(kind="worker_ready", fields=fields)]
    return prepend(_admit_held(state, state.differing, at), ready) if state.differing else (state, ready)


def _keep_from_others(state: State, event: Ready, at: float) -> Outcome:
    """Refuse a worker on a GPU that failed too often, and let its process keep the GPU until the run ends.

    Otherwise the scheduler would give this GPU to the next worker. Its node is not to blame: its other GPUs work.
    """
    failures = count(device_failures.number(state, event.facts.device), "time")
    reason = f"{event.facts.device} failed {failures} in this run; this process keeps it, so that no worker gets it"
    fields = {"worker": event.worker, "node": event.facts.node, "reason": reason}
    return prepend(replace_missing(state, at), [Record(kind="worker_refused", fields=fields, durable=True)])


def _other_data(state: State, event: Ready) -> ConfigError:
    return ConfigError(
        f"worker {event.worker} on {event.facts.node} finds {event.facts.num_samples} samples, the run began with "
        f"{state.num_samples}: the order of samples depends on their number. Give the data that the run began with, or "
        "give the run another name."
    )


def _other_blocks(state: State, event: Ready) -> ConfigError:
    if min(event.facts.samples_per_block, state.blocks[0]) < 0:
        return ConfigError(
            f"worker {event.worker} on {event.facts.node} finds another order of samples than the run "
            "began with: it depends on a mixture's sources and weights, or on the lengths of bucketed samples. Give "
            "the data that the run began with, or give the run another name."
        )
    return ConfigError(
        f"worker {event.worker} on {event.facts.node} finds data whose blocks have {event.facts.samples_per_block} "
        f"samples, the run began with {state.blocks[0]}: the order of samples depends on them. Give the data that the "
        "run began with, with the same seq_len, or give the run another name."
    )


def _other_contents(event: Ready) -> ConfigError:
    return ConfigError(
        f"worker {event.worker} on {event.facts.node} finds data of the same length with other contents than the run "
        "began with: of packed documents, another plan or other tokens; of a token store, other shards, even if these "
        "have the same tokens. Give the data that the run began with, or give the run another name."
    )


def _hold(state: State, event: Ready, at: float) -> Outcome:
    """Hold a worker whose machine differs from the run's, as long as no other matches: all are decided on together."""
    held = {**state.differing, event.worker: event.facts}
    return decide_on_differing(replace(state, differing=held, last_ready_at=at), at)


def decide_on_differing(state: State, at: float) -> Outcome:
    """Decide on all workers that differ from the run, as soon as it could begin with them.

    The run ends, or continues with other bits. No node is at fault: the run is in another place than before.
    """
    held = {worker: facts for worker, facts in state.differing.items() if worker in state.starting}
    settled = len(held) == len(state.starting) or at - state.last_ready_at >= state.limits.join_wait_s
    if not held or len(held) < state.limits.min_workers or not settled:
        return state, []
    if not state.limits.accept_arithmetic:
        return finish(state, arithmetic.refusal(state, held))
    machine, number = arithmetic.most_common(held)
    if number < state.limits.min_workers:  # too few to continue, and an acceptance cannot be withdrawn
        return state, []
    entry = arithmetic.entry(state.step + 1, numerics.changes(state.arithmetic or {}, machine), machine, state.numerics)
    return prepend(_admit_held(replace(state, arithmetic=machine, arithmetic_unmet=False), held, at), [entry])


def _admit_held(state: State, held: Mapping[WorkerId, WorkerInfo], at: float) -> Outcome:
    """Admit held workers that match the run by now, then refuse the others.

    The refusals do not count as failures in a row, because one worker did not fail.
    """
    state, commands = replace(state, differing={}), list[Command]()
    for worker in sorted(held, key=lambda worker: (not arithmetic.fits(state, held[worker]), worker)):
        if worker in state.starting and state.phase is not Phase.OVER:
            state, more = admit(replace(state, start_failures=0), Ready(worker=worker, facts=held[worker]), at)
            commands += more
    return replace(state, start_failures=0), commands


def _refuse(state: State, event: Ready, differing: arithmetic.Differing, at: float) -> Outcome:
    reason = numerics.describe(differing)
    commands: list[Command] = [
        KillWorker(worker=event.worker, at_once=False),
        Record(kind="worker_refused", fields={"worker": event.worker, "node": event.facts.node, "reason": reason}),
    ]
    state = node_verdicts.note_failed_start(_count_start_failure(state, reason, at), event.facts.node_id, at)
    state, avoiding = node_verdicts.count_failure(state, event.facts.node_id, f"refused: {reason}", at)
    commands.extend(avoiding)
    if _cannot_start(state):
        way_out = 'machines of one kind, or give up identical bits with EngineConfig(reduction="fast").'
        if arithmetic.lacks(state, event.facts):
            way_out = "one version of raysharded everywhere."
        error = ClusterError(
            f"worker {event.worker} on {event.facts.node} would compute other bits than the run ({reason}). Run on "
            f"{way_out}"
        )
        return prepend(finish(state, error), commands)
    return state, commands


def failed_to_start(state: State, event: WorkerLost, at: float) -> Outcome:
    """Handle a worker that never became ready: retry later, or end the run when there are too few without it.

    Workers that were requested before a failure may have failed from its cause: they do not count as further ones.
    """
    requested = state.starting.get(event.worker, at)
    state = replace(state, starting=without(state.starting, event.worker))
    if not state.start_failures or requested > state.start_failed_at:
        state = _count_start_failure(state, event.reason, at)
    state = node_verdicts.note_failed_start(state, event.node_id, at)
    commands: list[Command] = [
        Record(kind="start_failed", fields={"worker": event.worker, "reason": event.reason}, durable=True)
    ]
    if not isinstance(event.error, TaskError | ConfigError):  # these would happen anywhere
        state, avoiding = node_verdicts.count_failure(state, event.node_id, event.reason, at, died=event.node_died)
        commands.extend(avoiding)
    if _is_short_of_workers(state) and isinstance(event.error, RayshardedError) and not state.facts:
        return prepend(
            finish(state, event.error), commands
        )  # the data or the task, not the machine: no worker was ready yet
    if _cannot_start(state):
        if isinstance(event.error, RayshardedError):
            return prepend(finish(state, event.error), commands)
        first = state.first_start_failure
        last = f"the last: {event.reason}" if event.reason == first else f"the first: {first}; the last: {event.reason}"
        error = RunFailed(f"{state.start_failures} workers in a row failed to start; {last}")
        return prepend(finish(state, error), commands)
    return state, commands


def _count_start_failure(state: State, reason: str, at: float) -> State:
    """Count a failed start. The next attempts wait, twice as long after every failure in a row."""
    wait_s = min(state.limits.start_backoff_s * 2**state.start_failures, state.limits.max_start_backoff_s)
    first = state.first_start_failure if state.start_failures else reason
    failures = state.start_failures + 1
    return replace(
        state, start_failures=failures, first_start_failure=first, start_failed_at=at, start_after=at + wait_s
    )


def _is_short_of_workers(state: State) -> bool:
    return state.phase is Phase.GATHERING and len(state.ready) < state.limits.min_workers


def _cannot_start(state: State) -> bool:
    """Whether the run must end; one that has enough workers continues without the others."""
    return _is_short_of_workers(state) and state.start_failures >= state.limits.max_start_failures


def too_few(state: State, apart: str = "") -> ClusterError:
    """Error of a run whose workers do not start, or do not reach each other: `apart` is a sentence about these."""
    limits, held = state.limits, state.differing.keys() & state.starting.keys()
    would_differ = f" and {len(held)} would compute other bits than the run has so far" if held else ""
    if apart:
        return ClusterError(
            f"{len(state.ready)} workers are ready, and for {limits.start_timeout_s:.0f} s fewer than the minimum of "
            f"{limits.min_workers} have reached each other. {apart} Repair the network between them, add nodes, or "
            "lower the minimum in ScalingConfig.num_workers."
        )
    return ClusterError(
        f"{len(state.ready)} of at least {limits.min_workers} workers could be started within "
        f"{limits.start_timeout_s:.0f} s{would_differ}; {len(state.starting) - len(held)} still wait for resources. "
        "Add nodes, ask for less per worker, lower the minimum in ScalingConfig.num_workers, or raise "
        "ScalingConfig.start_timeout_s."
    )

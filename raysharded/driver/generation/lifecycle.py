"""The lifecycle of a generation: formed, trained, stopped, followed by the next. Handlers of the machine."""

from __future__ import annotations

from collections.abc import Sequence

from raysharded.driver.checkpoints import save_timer, saves
from raysharded.driver.generation import link_tests, paused_run, planned_change, step_reports
from raysharded.driver.membership import candidates, reachable
from raysharded.driver.membership.generation_plan import plan_generation
from raysharded.driver.membership.state_source import (
    clamp_leave_steps,
    describe_redundancy,
    describe_source,
    failed_devices,
    is_redundant,
    sources_of,
    trusted,
    without_its_source,
)
from raysharded.driver.rollback import corruption_rollback, non_finite, pending_overrides
from raysharded.driver.state import mesh_choice, recovery_timeline
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import (
    AskReport,
    Command,
    Form,
    Interrupt,
    Outcome,
    Poll,
    Record,
    RequestBoundary,
    Train,
    finish,
    prepend,
)
from raysharded.driver.state.persistent_map import with_entry
from raysharded.driver.state.state import Phase, State
from raysharded.driver.workers import admission, proof_failures, task_failures
from raysharded.errors import CorruptCheckpoint, IncompleteCheckpoint, NonFiniteLoss, RunFailed
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.messages import Corruption, GenerationReady, GenerationSpec, Prepared, Stopped, StopReason

_BROKEN = (StopReason.ABORTED, StopReason.TASK_ERROR, StopReason.REFUSED, StopReason.CORRUPT, StopReason.DEVICE)


def maybe_request_change(state: State, at: float) -> Outcome:
    """Form a first generation of the ready workers, or request a boundary at which they join.

    Workers that must leave go at the same boundary.
    """
    settled = not state.starting or at - state.last_ready_at >= state.limits.join_wait_s
    if state.phase is Phase.GATHERING:
        chosen = reachable.choose(state)
        enough = chosen.only_save or len(reachable.usable(state)) >= state.limits.min_workers
        full = len(state.staying & chosen.workers) >= state.limits.max_workers
        return next_generation(state, at) if full or (enough and settled) else (state, [])
    if state.phase is not Phase.TRAINING or state.boundary_requested:
        return state, []
    progressed = state.step > state.generation_start_step
    wanted = progressed and _has_room_for_joiners(state) and _is_worth_it(state)
    state = replace(state, resharding=_is_to_reshard(state))
    if state.wanted_rewind is not None:  # no state moves in memory: nothing to prepare
        state = replace(state, boundary_requested=True, preparation=None)
        return state, [RequestBoundary(worker=state.members[0], generation=state.generation)]
    decides = pending_overrides.is_wanted(state)
    if not (wanted and settled) and not (state.resharding or decides) and not candidates.should_stop(state, at):
        kept = state.preparation if wanted else None  # its deadline stays, whichever workers join or leave
        return (state if state.preparation is kept else replace(state, preparation=kept)), []
    return planned_change.prepare_then_request_boundary(state, at)


def _has_room_for_joiners(state: State) -> bool:
    """Whether a ready worker that is no member may become one."""
    staying = reachable.joinable(state)
    joiners = staying.difference(state.members)
    members = len(staying) - len(joiners)
    return bool(joiners) and members < state.limits.max_workers and members < candidates.most_at_work(state, staying)


def _is_to_reshard(state: State) -> bool:
    """Whether another mesh was requested, and these workers would form one.

    A request for the current mesh is already fulfilled.
    """
    if not state.resharding or not state.staying:
        return False
    mesh = mesh_choice.possible_mesh(state.limits.grouping, _num_workers(state), _num_needed(state))
    return mesh not in (None, replace(state.mesh, apart=1))


def _is_worth_it(state: State) -> bool:
    """Whether a mesh of the workers that are ready now is better. They may be too few for one more group."""
    return mesh_choice.is_better(state.limits.grouping, _num_workers(state), state.mesh, _num_needed(state))


def _num_workers(state: State) -> int:
    """Largest possible size of the next generation, without workers that must leave."""
    joinable = reachable.joinable(state)
    return min(len(joinable), candidates.most_at_work(state, joinable))


def _num_needed(state: State) -> int:
    """Number of members that cannot stand by in the next generation: all, if each holds data that no other does."""
    return 0 if is_redundant(state) else len(state.members)


def next_generation(state: State, at: float, *, resting: bool = False) -> Outcome:
    """Form the next generation of the ready workers.

    In a pause, enter the pause instead, unless the generation is a `resting` one, which does no step.
    """
    if paused_run.holds_back(state) and not resting:
        return paused_run.enter(state, at)
    chosen = reachable.choose(state)
    if not reachable.can_form(state, chosen):
        return gather(state, at)
    state, refused = pending_overrides.without_impossible(state)
    able = chosen.workers if state.wanted_rewind is None else chosen.workers - failed_devices(state)
    composed = plan_generation(replace(pending_overrides.as_wanted(state), ready=able))
    plan = pending_overrides.plan(state, composed.source)
    source, members, mesh, prepared = composed.source, composed.members, composed.mesh, composed.preparation
    step = state.step if plan and plan.rewind else source.step  # a requested rewind is not decided yet
    generation = GenerationId(state.generation + 1)
    host, port, keys = state.rendezvous
    spec = GenerationSpec(
        generation=generation,
        members=members,
        source=source,
        host=host,
        port=port,
        prefix=f"{keys}/g{generation}",
        driver=state.driver,
        decisions=plan.decisions if plan else state.decisions,
        replicas=mesh.replicas,
        tensor=mesh.tensor,
        apart=mesh.apart,
        nodes=composed.nodes,
        prepared=prepared.prefix if prepared else "",
        numerics=state.numerics,
        build_seed=state.build_seed,
        blocks=state.blocks,
        newcomers=proof_failures.newcomers(state, members),
        shift=task_failures.shift_of_retry(state, members, mesh, source),
        failed_devices=composed.sources,
    )
    state = replace(
        state,
        phase=Phase.FORMING,
        since=at,
        generation=generation,
        members=members,
        replicas=mesh.replicas,
        tensor=mesh.tensor,
        apart=mesh.apart,
        awaited=frozenset(members),
        stops={},
        boundary_requested=False,
        resharding=False,
        preparation=None,
        plan=plan,
        step=step,
        generation_start_step=step,
        has_trained=False,
        relayed=chosen.hands_over or chosen.only_save,
        verified_step=min(state.verified_step, step),
        leaving=clamp_leave_steps(state.leaving, step),
        source=source,
        bytes_received=0,
        bytes_read=0,
        incident=recovery_timeline.resumed(state.incident, source.step, describe_source(source), at),
    )
    fields = {"generation": generation, "members": list(members), "step": source.step}
    fields["source"] = describe_source(source)
    if composed.sources:
        fields["failed_devices"] = list(composed.sources)
    if resting:
        fields["paused"] = True
    if chosen.hands_over:
        fields["hands_over"] = True
    if chosen.only_save:
        fields["only_saves"] = True
    why = "; ".join(filter(None, (composed.why, chosen.why)))
    if why:
        fields |= {"mesh": str(mesh), "why": why}
    redundancy = describe_redundancy(state.limits, state.mesh)
    if redundancy is not None:
        fields["redundancy"] = redundancy
    if prepared is not None:
        fields["prepared_s"] = at - prepared.since
    spares = sorted(state.staying.intersection(chosen.workers).difference(members))
    if spares:
        fields["spares"] = spares
    excluded = sorted(state.ready - chosen.workers)
    if excluded:
        fields["excluded"] = excluded
    return state, [*refused, Record(kind="generation", fields=fields, durable=True), Form(spec=spec)]


def gather(state: State, at: float) -> Outcome:
    if paused_run.holds_back(state):
        return paused_run.enter(state, at)
    state = replace(state, phase=Phase.GATHERING, since=at, start_failures=0, start_after=0.0)
    state, saving = paused_run.save_rested(state, at)
    return prepend(admission.replace_missing(state, at), saving)


def on_formed(state: State, worker: WorkerId, formed: GenerationReady, at: float) -> Outcome:
    if formed.generation != state.generation:
        return state, []
    if state.phase is Phase.STOPPING:  # it formed before it learned that another one did not
        return state, [AskReport(worker=worker, generation=state.generation)]
    if state.phase is not Phase.FORMING:
        return state, []
    if worker in state.awaited:
        received, read = state.bytes_received + formed.bytes_received, state.bytes_read + formed.bytes_read
        state = replace(state, awaited=state.awaited - {worker}, bytes_received=received, bytes_read=read)
    if state.awaited:
        return state, []
    why = pending_overrides.why_not_decided(state)
    if why:
        state, commands = pending_overrides.without_planned_rewind(state, why)
        return prepend(stop_all(state, at), commands)
    state, commands = pending_overrides.decide(state)
    state = replace(state, incident=recovery_timeline.formed(state.incident, at), spec=formed.spec)
    fields = {
        "generation": state.generation,
        "seconds": dict(formed.seconds),
        "bytes_received": state.bytes_received,
        "bytes_read": state.bytes_read,
    }
    commands.append(Record(kind="formed", fields=fields))
    return (state, commands) if state.unrecorded is not None else prepend(train(state, at), commands)


def train(state: State, at: float) -> Outcome:
    """Start training: all members hold the state, and the journal has the decisions."""
    state, late = paused_run.too_late(state) if state.step >= state.limits.max_steps else (state, [])
    awaited, rest = frozenset(state.members), paused_run.holds_back(state) or state.relayed
    state = replace(state, phase=Phase.TRAINING, since=at, awaited=awaited, holdings={}, has_trained=True)
    state = replace(state, boundary_requested=rest)
    commands: list[Command] = [*late, Train(generation=state.generation, members=state.members, rest=rest)]
    if rest:
        return state, commands
    state, asked = saves.request_save(state)
    state, again = save_timer.repeat_if_due(state, at)
    poll = Poll(worker=state.members[0], generation=state.generation, after_step=state.step)
    return state, [*commands, *asked, *again, poll]


def on_prepared(state: State, worker: WorkerId, prepared: Prepared, at: float) -> Outcome:
    after = planned_change.on_prepared(state, worker, prepared)
    return (state, []) if after is state else maybe_request_change(after, at)


def stop_all(state: State, at: float) -> Outcome:
    """Free every member that has not stopped, and what hands over to them. Those that have formed only report."""
    waiting = [worker for worker in state.members if worker in state.ready and worker not in state.stops]
    commands: list[Command] = [Interrupt(worker=w, generation=state.generation) for w in sorted(sources_of(state))]
    for worker in waiting:
        idle = state.phase is Phase.FORMING and worker not in state.awaited
        kind = AskReport if idle else Interrupt
        commands.append(kind(worker=worker, generation=state.generation))
    state = replace(state, phase=Phase.STOPPING, since=at, awaited=frozenset(waiting), preparation=None)
    return prepend(all_stopped(state, at), commands) if not waiting else (state, commands)


def on_stopped(state: State, worker: WorkerId, stopped: Stopped, at: float) -> Outcome:
    if stopped.generation != state.generation or worker not in state.ready:
        return state, []
    state, commands = step_reports.apply_reports(state, step_reports.following(state, stopped.reports), at)
    if state.phase is Phase.OVER:
        return state, commands
    state = replace(
        state,
        stops=with_entry(state.stops, worker, stopped),
        holdings=with_entry(state.holdings, worker, trusted(state, stopped)),
        awaited=state.awaited - {worker},
    )
    if stopped.reason in _BROKEN and state.phase in (Phase.FORMING, Phase.TRAINING):
        state = replace(state, incident=recovery_timeline.found(state, at))
        return prepend(stop_all(state, at), commands)
    if state.awaited or state.phase not in (Phase.TRAINING, Phase.STOPPING):
        return state, commands
    return prepend(all_stopped(state, at), commands)


def all_stopped(state: State, at: float) -> Outcome:
    """Decide how to continue: every member has reported its holdings and steps, or is lost."""
    state, commands = step_reports.apply_reports(state, step_reports.of_all(state.stops.values()), at)
    return (state, commands) if state.phase is Phase.OVER else prepend(after_all_stopped(state, at), commands)


def after_all_stopped(state: State, at: float) -> Outcome:
    state = replace(state, incident=recovery_timeline.stopped(state.incident, state.step, at))
    if link_tests.must_wait(state):
        return state, []
    corruption = corruption_rollback.found(state)
    if corruption is not None:
        return _evict(state, corruption, at) if corruption.takes_back else _without_failed(state, corruption, at)
    stops = list(state.stops.values())
    vain = _rewound_in_vain(state, stops)
    if vain:
        state, commands = pending_overrides.without_planned_rewind(state, vain)
        return prepend(next_generation(state, at), commands)
    refused = [s for s in stops if s.reason is StopReason.REFUSED]
    errors = task_failures.errors(state)
    if refused:
        return _refused(state, refused[0].error, at)
    not_finite = non_finite.cause(state)
    if not_finite is not None:
        return (state, []) if non_finite.must_wait(state) else _rewind(state, not_finite, at)
    if errors:
        first = next(iter(errors.values())).error
        if isinstance(first, NonFiniteLoss):
            state, commands = saves.end(state, first, at)
        else:
            state, commands = task_failures.count(state, errors, at)
        return (state, commands) if state.phase is Phase.OVER else prepend(_go_on(state, stops, at), commands)
    return _go_on(state, stops, at)


def _go_on(state: State, stops: Sequence[Stopped], at: float) -> Outcome:
    """Continue after a generation whose end is no error that ends the run."""
    lost = not state.ready.issuperset(state.members)  # a member may be lost after it stopped
    if not lost and all(s.reason is StopReason.FINISHED for s in stops):
        state, undecided = pending_overrides.without_impossible(state)
        state, late = paused_run.too_late(state)
        return prepend(saves.close(state, at), [*undecided, *late])
    if link_tests.is_suspicious(state, stops):
        state = replace(state, incident=recovery_timeline.found(state, at))
        return link_tests.ask_all(state, at)
    planned = all(s.reason is StopReason.BOUNDARY for s in stops)
    progressed = state.step > state.generation_start_step
    idle = 0 if lost or planned or progressed else state.idle_generations + 1
    why = _why(stops)
    state = replace(state, idle_generations=idle, first_idle=why if idle == 1 else state.first_idle)
    if idle > state.limits.max_idle_generations:
        first = "" if state.first_idle == why else f" The first: {state.first_idle}"
        error = RunFailed(f"{idle} generations in a row failed without a loss: {why}{first}{_began(state)}")
        state, commands = saves.end(state, error, at)
        if state.phase is Phase.OVER:
            return state, commands
    return _after_a_loss(state, at) if lost else next_generation(state, at)


def _rewound_in_vain(state: State, stops: Sequence[Stopped]) -> str:
    """Reason why the generation could not be formed from the rewind's checkpoint, if that is to blame; or empty."""
    if state.plan is None or state.plan.rewind is None:
        return ""
    failed = next((stop.error for stop in stops if stop.reason in (StopReason.REFUSED, StopReason.TASK_ERROR)), None)
    if failed is not None:
        return f"{type(failed).__name__}: {failed}"
    lost = not state.ready.issuperset(state.members)
    return "" if lost else _why(stops) or "the generation was not formed from it"


def _began(state: State) -> str:
    """Sentence with the first sign that the driver itself observed; empty if there is none."""
    reasons = state.incident.reasons if state.incident else ()
    return f" It began with: {reasons[0]}." if reasons else ""


def _why(stops: Sequence[Stopped]) -> str:
    """Error of the member that stopped first: the others' errors follow from it."""
    failed = [stop for stop in stops if stop.error is not None]
    return str(min(failed, key=lambda stop: stop.stopped_at).error) if failed else ""


def _after_a_loss(state: State, at: float) -> Outcome:
    """Wait for a replacement first, if configured."""
    waits = state.limits.replacement_wait_s > 0 and len(state.ready) < state.limits.max_workers
    return gather(state, at) if waits else next_generation(state, at)


def _evict(state: State, corruption: Corruption, at: float) -> Outcome:
    state, commands = corruption_rollback.evict(state, corruption, at)
    return (state, commands) if state.phase is Phase.OVER else prepend(_after_a_loss(state, at), commands)


def _without_failed(state: State, corruption: Corruption, at: float) -> Outcome:
    """Remove failed newcomers, and wait for no replacement: the others were at work before they came."""
    state, commands = proof_failures.failed(state, corruption, at)
    return (state, commands) if state.phase is Phase.OVER else prepend(next_generation(state, at), commands)


def _rewind(state: State, stopped: Stopped, at: float) -> Outcome:
    state, commands = non_finite.rewind(state, stopped, at)
    return (state, commands) if state.phase is Phase.OVER else prepend(next_generation(state, at), commands)


def _refused(state: State, error: BaseException | None, at: float) -> Outcome:
    """Fail, since a retry would not help, or use another checkpoint in place of a damaged one."""
    damaged = isinstance(error, CorruptCheckpoint | IncompleteCheckpoint)
    other = without_its_source(state) if damaged else None
    if other is None:
        return finish(state, error)
    fields = {"step": state.generation_start_step, "reason": str(error)}
    return prepend(next_generation(other, at), [Record(kind="checkpoint_skipped", fields=fields, durable=True)])

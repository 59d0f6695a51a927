"""Generations without progress: their members are probed, and stuck ones are killed. Handlers of the machine."""

from __future__ import annotations

from collections.abc import Collection

from raysharded.driver.checkpoints import saves
from raysharded.driver.generation import lifecycle, link_tests
from raysharded.driver.handlers import leave_notice, worker_loss
from raysharded.driver.membership.state_source import needs, sources_of
from raysharded.driver.rollback import corruption_rollback, non_finite
from raysharded.driver.state import recovery_timeline, step_watch, stragglers
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, KillWorker, Outcome, Probe, Record, prepend
from raysharded.driver.state.persistent_map import with_entry
from raysharded.driver.state.state import Phase, State
from raysharded.driver.state.step_watch import StepWatch
from raysharded.driver.state.stragglers import StepTime
from raysharded.driver.workers import node_verdicts
from raysharded.ids import WorkerId
from raysharded.protocol.messages import ProbeReply
from raysharded.protocol.worker_launcher import LeaveNotice, WorkerLost

_EVICTED_WITHIN_S = 600.0
"""Longest time that a slow worker stays until it is no longer needed."""


def on_tick(state: State, at: float) -> Outcome:
    """Probe the members that the phase waits for; kill those that do not answer in time."""
    patience, watch, since = _patience_s(state), state.watch, _since(state)
    waited = at - max(since, watch.excused_at)
    if waited < patience / 2:
        return state, []
    if watch.asked_at is None or watch.asked_at <= since:  # or the probe was in an earlier phase
        return _ask(state, at, again=False)
    if not watch.listened:
        return replace(state, watch=replace(watch, listened=True)), []
    if waited < patience or at - watch.asked_at < step_watch.answer_s(patience):
        return state, []
    missing = step_watch.silent(_expected_to_answer(state), watch)
    if missing:
        return _give_up(state, missing, at)
    if state.phase is not Phase.TRAINING or watch.again:
        state = replace(state, watch=step_watch.excused(watch, at))
        waits = state.phase is Phase.FORMING and all(one.waits for one in watch.seen.values())
        return link_tests.ask_all(state, at) if waits else (state, [])
    return _ask(state, at, again=True)


def on_seen(state: State, worker: WorkerId, seen: ProbeReply, at: float) -> Outcome:
    """Handle a probe reply. When all members have answered after the deadline, the stuck ones are known."""
    if seen.generation != state.generation:
        return state, []
    state, told = _compare(state, worker, seen, at)
    return prepend(_conclude(state, worker, seen, at), told)


def _conclude(state: State, worker: WorkerId, seen: ProbeReply, at: float) -> Outcome:
    watch = state.watch
    if watch.asked_at is None:
        return state, []
    watch = replace(watch, seen={**watch.seen, worker: seen})
    state = replace(state, watch=watch)
    if not watch.again or state.phase is not Phase.TRAINING or step_watch.silent(_expected_to_answer(state), watch):
        return state, []
    verdict = step_watch.judge(watch)
    if verdict.stuck:
        return _give_up(state, verdict.stuck, at)
    if verdict.all_wait and any(one.phase not in step_watch.LONG_PHASES for one in watch.seen.values()):
        return _break_up(state, at)
    return replace(state, watch=step_watch.excused(watch, at)), []


def probe_all(state: State, at: float) -> Outcome:
    """Probe all members for their speed from time to time, while all is well."""
    is_due = stragglers.is_due(state.step_times, len(state.members), state.limits.look_around_s, at)
    if not is_due or state.watch.asked_at is not None:
        return state, []
    paces = replace(state.step_times, asked_at=at, asking=True, answers={})
    return replace(state, step_times=paces), [Probe(worker=w, generation=state.generation) for w in state.members]


def _compare(state: State, worker: WorkerId, seen: ProbeReply, at: float) -> Outcome:
    """Judge the members' speed when all have replied: record those that have been slow for long, and evict some."""
    if not state.step_times.asking or state.phase is not Phase.TRAINING:
        return state, []
    if worker not in state.awaited and worker not in state.members:  # `awaited` is a set, of members: checked first
        return state, []
    answers = with_entry(state.step_times.answers, worker, replace(seen, stack=""))
    if len(answers) < len(state.members) or not answers.keys() >= set(state.members):
        return replace(state, step_times=replace(state.step_times, answers=answers)), []
    found = stragglers.paces_of({member: answers[member] for member in state.members})
    paces, told = stragglers.judged(state.step_times, found, step_s=step_watch.usual_s(state.watch))
    state = replace(state, step_times=paces)
    commands: list[Command] = [_straggler(state, slow, found[slow]) for slow in told]
    limit = state.limits.evict_slower_than
    evicted = tuple(slow for slow in told if limit is not None and found[slow].score >= limit)
    if not evicted:
        return state, commands
    reason = f"{limit:g} times slower than its peers"
    for slow in [worker for worker in evicted if worker not in state.leaving and worker in state.facts]:
        state, avoiding = node_verdicts.count_failure(state, state.facts[slow].node_id, reason, at)
        commands += avoiding  # otherwise the next one may be placed there again, for ever
    notice = LeaveNotice(workers=evicted, reason=reason, within_s=_EVICTED_WITHIN_S)
    return prepend(leave_notice.on_noticed(state, notice, at), commands)


def _straggler(state: State, worker: WorkerId, pace: StepTime) -> Record:
    facts = state.facts.get(worker)
    fields = {
        "worker": worker,
        "node": facts.node if facts else "",
        "step": state.step,
        "phase": pace.phase,
        "score": round(pace.score, 3),
        "lost_s": round(pace.lost_s, 6),
    }
    return Record(kind="straggler", fields=fields)


def _since(state: State) -> float:
    """Time since which the phase, or in a pause the newest checkpoint, waits for members."""
    if state.phase is not Phase.PAUSED:
        return state.since
    return max([state.since, *(saving.since for saving in state.saves.values())])


def _patience_s(state: State) -> float:
    limits = state.limits
    if state.phase in (Phase.FORMING, Phase.CLOSING) or _waits_for_a_checkpoint(state):
        return limits.forming_patience_s
    if state.phase is Phase.STOPPING:
        return limits.stopping_patience_s
    longest, first = saves.progress_timeout_s(state), state.step == state.generation_start_step
    if first and limits.compiles:
        return longest
    return step_watch.deadline_s(state.watch, shortest_s=limits.hang_timeout_s, longest_s=longest, first=first)


def _expected_to_answer(state: State) -> frozenset[WorkerId]:
    if state.phase is Phase.TRAINING:
        return state.ready.intersection(state.members)
    if state.phase is Phase.CLOSING or _waits_for_a_checkpoint(state):
        return state.ready & saves.owing(state)
    return (state.awaited | sources_of(state)) & state.ready


def _waits_for_a_checkpoint(state: State) -> bool:
    """Whether all have stopped, and a rollback or a paused run waits for the checkpoint that they still write."""
    return state.phase is Phase.PAUSED or (state.phase is Phase.STOPPING and not state.awaited)


def _ask(state: State, at: float, *, again: bool) -> Outcome:
    waited = frozenset(worker for worker, one in state.watch.seen.items() if again and one.waits)
    watch = replace(state.watch, asked_at=at, again=again, listened=False, seen={}, waited=waited)
    asked: list[Command] = [
        Probe(worker=worker, generation=state.generation) for worker in sorted(_expected_to_answer(state))
    ]
    return replace(state, watch=watch), asked


def _give_up(state: State, stuck: Collection[WorkerId], at: float) -> Outcome:
    """Kill stuck members, unless their holdings would be lost. Recovery does not wait for their death."""
    goes_back = corruption_rollback.found(state) is not None or non_finite.cause(state) is not None
    if not goes_back and needs(state, stuck):
        return _wait_for(state, stuck, at)
    watch, waited = state.watch, at - _since(state)
    state = replace(state, watch=step_watch.at_rest(watch))
    commands: list[Command] = []
    lost: list[WorkerLost] = []
    for worker in stuck:
        reason = _reason(state, watch, worker, waited)
        commands += [_stuck(state, watch, worker, waited, reason), KillWorker(worker=worker)]
        lost.append(WorkerLost(worker=worker, reason=reason))
    return prepend(worker_loss.all_lost(state, lost, at), commands)


def _wait_for(state: State, stuck: Collection[WorkerId], at: float) -> Outcome:
    """Free the other members, and wait for stuck ones that alone hold a part of the state: they may wake up.

    They get as long as any member that does not answer. The journal records it once per phase.
    """
    watch, waited = state.watch, at - _since(state)
    commands: list[Command] = []
    stays = state.phase in (Phase.STOPPING, Phase.CLOSING, Phase.PAUSED)
    if not stays or watch.excused_at < _since(state):
        for worker in stuck:
            reason = f"{_reason(state, watch, worker, waited)}; it is waited for: nobody else holds what it does"
            commands.append(_stuck(state, watch, worker, waited, reason))
    state = replace(state, watch=step_watch.excused(watch, at))
    if stays:
        return state, commands
    named = " and ".join(map(str, stuck))
    incident = recovery_timeline.found(state, at, reason=f"no word from {named}, and nobody else holds what is there")
    return prepend(lifecycle.stop_all(replace(state, incident=incident), at), commands)


def _break_up(state: State, at: float) -> Outcome:
    """Stop members that all wait for each other: the collective is broken, or one of them is in another."""
    phases = sorted({one.phase for one in state.watch.seen.values()})
    reason = f"all workers wait for each other in {' and '.join(phases)} for {at - state.since:.1f} s"
    behind = step_watch.behind(state.watch)
    if behind:
        reason += f"; {' and '.join(map(str, behind))} had not begun the collective that the GPUs of others are in"
    fields: dict[str, object] = {
        "step": state.current_step,
        "seconds": at - state.since,
        "deadline_s": _patience_s(state),
        "reason": reason,
        "phase": phases[0],
    }
    if behind:
        fields["behind"] = list(behind)
    state = replace(
        state, watch=step_watch.at_rest(state.watch), incident=recovery_timeline.found(state, at, reason=reason)
    )
    state, asked = link_tests.ask_all(state, at)
    return prepend(lifecycle.stop_all(state, at), [Record(kind="stuck", fields=fields, durable=True), *asked])


def _reason(state: State, watch: StepWatch, worker: WorkerId, waited: float) -> str:
    seen = watch.seen.get(worker)
    if seen is None:
        when = f"{waited:.1f} s into step {state.current_step}"
        return f"did not answer while {state.phase.value}, {when}: stopped or cut off"
    where = f", at {seen.where}" if seen.where else ""
    return f"stuck in {seen.phase} of step {seen.step + 1} for {seen.phase_s:.1f} s{where}"


def _stuck(state: State, watch: StepWatch, worker: WorkerId, waited: float, reason: str) -> Record:
    seen, facts = watch.seen.get(worker), state.facts.get(worker)
    fields: dict[str, object] = {
        "worker": worker,
        "node": facts.node if facts else "",
        "step": state.current_step,
        "phase": seen.phase if seen else state.phase.value,
        "seconds": seen.phase_s if seen else waited,
        "deadline_s": _patience_s(state),
        "reason": reason,
    }
    if seen is not None:
        fields["stack"] = seen.stack
    return Record(kind="stuck", fields=fields, durable=True)

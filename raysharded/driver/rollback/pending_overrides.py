"""User decisions during training: made at a step boundary, recorded before they take effect. Pure.

After a request, the next generation is formed as if the decision held. When all members have their state, the decision
is written to the journal; when the entry is durable, the generation trains. So the journal determines every step that
was ever computed with it, and a decision that is lost with its driver was never made.
"""

from __future__ import annotations

from raysharded.driver.checkpoints import protected
from raysharded.driver.rollback import rewind
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, Outcome, Record
from raysharded.driver.state.state import PendingOverrides, State, WantedRate, WantedWeights
from raysharded.overrides import changed, reweighted, skipped_before
from raysharded.protocol.messages import Source


def is_wanted(state: State) -> bool:
    """Whether a request is not decided yet."""
    return (state.wanted_rate, state.wanted_weights, state.wanted_rewind) != (None, None, None)


def first_step(state: State) -> int:
    """First step to which a learning rate, or weights, would apply that are decided at the next boundary."""
    if state.wanted_rewind is not None:
        return state.wanted_rewind.checkpoint.step + 1
    return max(state.step, state.reached) + 1


def without_impossible(state: State) -> Outcome:
    """The state without requests that have become impossible."""
    commands: list[Command] = []
    rewinding = state.wanted_rewind
    if rewinding is not None:
        to_step = rewinding.checkpoint.step
        why = rewind.refusal(state, to_step)
        if why:
            commands.append(refused_rewind(state, to_step, why))
            state = replace(state, wanted_rewind=None)
        else:
            still = rewind.wanted(state, to_step, skip_data=rewinding.skip_data, number=rewinding.number)
            state = state if still == rewinding else replace(state, wanted_rewind=still)
    if state.wanted_rate is not None and first_step(state) > state.limits.max_steps:
        commands.append(refused_rate(state, state.wanted_rate.factor, last_step_is_done(state)))
        state = replace(state, wanted_rate=None)
    if state.wanted_weights is not None:
        why = has_no_weights(state) or (last_step_is_done(state) if first_step(state) > state.limits.max_steps else "")
        if why:
            commands.append(refused_weights(state, state.wanted_weights.weights, why))
            state = replace(state, wanted_weights=None)
    return state, commands


def at_the_end(state: State) -> list[Command]:
    """Refusals for the journal of requests that the run's end leaves undecided."""
    why = "the run ended before it was decided."
    commands: list[Command] = []
    if state.wanted_rate is not None:
        commands.append(refused_rate(state, state.wanted_rate.factor, why))
    if state.wanted_weights is not None:
        commands.append(refused_weights(state, state.wanted_weights.weights, why))
    if state.wanted_rewind is not None:
        commands.append(refused_rewind(state, state.wanted_rewind.checkpoint.step, why))
    return commands


def without_planned_rewind(state: State, why: str) -> Outcome:
    """The state without the rewind that the generation was to be formed with; a newer request stays."""
    assert state.plan is not None
    assert state.plan.rewind is not None
    rewinding, wanted = state.plan.rewind, state.wanted_rewind
    is_the_same = wanted is not None and wanted.number == rewinding.number
    record = refused_rewind(state, rewinding.checkpoint.step, why)
    return replace(state, wanted_rewind=None if is_the_same else wanted, plan=None), [record]


def why_not_decided(state: State) -> str:
    """Reason why the plan has become impossible although all members hold its state; empty if it has not."""
    rewinding = state.plan.rewind if state.plan is not None else None
    if rewinding is None or rewinding.checkpoint in protected.known(state):
        return ""
    return f"the checkpoint of step {rewinding.checkpoint.step} was deleted meanwhile, as newer ones are kept: pin it."


def as_wanted(state: State) -> State:
    """The state from which the next generation's source is chosen: for a rewind, nothing but its checkpoint."""
    if state.wanted_rewind is None:
        return state
    return replace(
        state, holdings={}, checkpoint=state.wanted_rewind.checkpoint, older_checkpoints=(), preparation=None
    )


def plan(state: State, source: Source) -> PendingOverrides | None:
    """Decisions of the next generation, which is formed from `source`; None without a request."""
    if not is_wanted(state):
        return None
    decisions, done = state.decisions, max(state.reached, source.step)
    if state.wanted_rewind is not None:
        decisions, done = rewind.decisions_after(state, state.wanted_rewind), source.step
    wanted = state.wanted_rate
    rate = None if wanted is None or _is_undone(state, wanted) else (done + 1, wanted.factor)
    if rate is not None:
        decisions = replace(decisions, rates=changed(decisions.rates, from_step=rate[0], factor=rate[1]))
    asked, weights = state.wanted_weights, None
    if asked is not None and not _is_undone(state, asked):
        position = done * state.limits.global_batch_size + skipped_before(decisions.skips, done + 1)
        weights = (done + 1, position, asked.weights)
        then = reweighted(decisions.weights, from_step=done + 1, position=position, weights=asked.weights)
        decisions = replace(decisions, weights=then)
    return PendingOverrides(
        decisions=decisions, answers=state.changes_asked, rate=rate, rewind=state.wanted_rewind, weights=weights
    )


def _is_undone(state: State, wanted: WantedRate | WantedWeights) -> bool:
    """Whether a later rewind request undoes this request."""
    return state.wanted_rewind is not None and wanted.number < state.wanted_rewind.number


def decide(state: State) -> Outcome:
    """Make the planned decisions and record them: all members hold their state."""
    made = state.plan
    if made is None:
        return state, []
    records: list[Record] = []
    if made.rewind is not None:
        state, fields = rewind.undo(state, made, made.rewind)
        records.append(Record(kind="rewind", fields=fields, durable=True))
    step, wanted = state.reached, state.wanted_rate
    if made.rate is not None:
        first, factor = made.rate
        fields = {"step": step, "factor": factor, "from_step": first}
        records.append(Record(kind="learning_rate", fields=fields, durable=True))
    elif wanted is not None and wanted.number <= made.answers:
        why = f"it is undone: going back to step {step} was asked for after it."
        records.append(refused_rate(state, wanted.factor, why))
    state, of_weights = _decide_weights(state, made)
    records += of_weights
    assert records, "a plan has a rate, weights or a way back"
    records[-1] = replace(records[-1], awaited_by=state.generation)  # the journal is written in order
    if wanted is not None and wanted.number <= made.answers:
        state = replace(state, wanted_rate=None)
    if state.wanted_rewind is not None and state.wanted_rewind.number <= made.answers:
        state = replace(state, wanted_rewind=None)
    return replace(state, decisions=made.decisions, plan=None, unrecorded=state.generation), [*records]


def _decide_weights(state: State, made: PendingOverrides) -> tuple[State, list[Record]]:
    """The state without a request for weights that the plan answers, and its entry."""
    records: list[Record] = []
    step, asked = state.reached, state.wanted_weights
    if made.weights is not None:
        first, position, weights = made.weights
        fields = {"step": step, "weights": dict(weights), "from_step": first, "from_position": position}
        records.append(Record(kind="mixture_weights", fields=fields, durable=True))
    if asked is None or asked.number > made.answers:
        return state, records
    if made.weights is None:
        why = f"it is undone: going back to step {step} was asked for after it."
        records.append(refused_weights(state, asked.weights, why))
    return replace(state, wanted_weights=None), records


# -- refused --


def last_step_is_done(state: State) -> str:
    """Reason why nothing can be changed after the last step."""
    return f"the run has done its last step, {state.step}: nothing is computed any more."


def has_no_weights(state: State) -> str:
    """Reason why the run's data can have no weights; empty if they can, or before the first worker has found them."""
    if state.num_samples is None or state.blocks[0] < 0:
        return ""
    return "the data of the run are no raysharded.Mixture: there is nothing that has weights."


def refused_rate(state: State, factor: float, why: str) -> Record:
    """Journal entry that refuses a learning rate."""
    fields = {"step": state.step, "factor": factor, "reason": why}
    return Record(kind="learning_rate_refused", fields=fields, durable=True)


def refused_weights(state: State, weights: tuple[tuple[str, float], ...], why: str) -> Record:
    """Journal entry that refuses weights of the mixture."""
    fields = {"step": state.step, "weights": dict(weights), "reason": why}
    return Record(kind="mixture_weights_refused", fields=fields, durable=True)


def refused_rewind(state: State, to_step: int, why: str) -> Record:
    """Journal entry that refuses a rewind."""
    fields = {"step": state.step, "to_step": to_step, "reason": why}
    return Record(kind="rewind_refused", fields=fields, durable=True)

"""What people decide while the run trains: at a step boundary, on record before it takes effect. Pure.

A decision is asked for; the next generation is formed as if it held; when all members have their state it is written to
the journal; and when it is there for good, the generation trains. So every step that was ever computed with it follows
from the journal, and a decision that is lost with its driver was never taken.
"""

from __future__ import annotations

from dataclasses import replace

from raysharded.driver.rollback import rewind
from raysharded.driver.state.commands import Command, Outcome, Record
from raysharded.driver.state.state import PendingOverrides, State, WantedRate
from raysharded.overrides import changed
from raysharded.protocol.messages import Source


def is_wanted(state: State) -> bool:
    """Whether something was asked for that is not decided yet."""
    return state.wanted_rate is not None or state.wanted_rewind is not None


def first_step(state: State) -> int:
    """The first step that a learning rate would hold for that is decided at the next boundary."""
    if state.wanted_rewind is not None:
        return state.wanted_rewind.checkpoint.step + 1
    return max(state.step, state.reached) + 1


def without_impossible(state: State) -> Outcome:
    """Without what was asked for and cannot be had any more."""
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
    return state, commands


def at_the_end(state: State) -> list[Command]:
    """What the journal says of what was asked for, when the run ends before it is decided."""
    why = "the run ended before it was decided."
    commands: list[Command] = []
    if state.wanted_rate is not None:
        commands.append(refused_rate(state, state.wanted_rate.factor, why))
    if state.wanted_rewind is not None:
        commands.append(refused_rewind(state, state.wanted_rewind.checkpoint.step, why))
    return commands


def without_planned_rewind(state: State, why: str) -> Outcome:
    """Without the checkpoint that the generation was to be formed from; somebody may want another one by now."""
    assert state.plan is not None
    assert state.plan.rewind is not None
    rewinding, wanted = state.plan.rewind, state.wanted_rewind
    is_the_same = wanted is not None and wanted.number == rewinding.number
    record = refused_rewind(state, rewinding.checkpoint.step, why)
    return replace(state, wanted_rewind=None if is_the_same else wanted, plan=None), [record]


def why_not_decided(state: State) -> str:
    """Why what was planned cannot be had any more, though all members hold its state; empty if it can."""
    rewinding = state.plan.rewind if state.plan is not None else None
    if rewinding is None or rewinding.checkpoint in rewind.known(state):
        return ""
    return f"the checkpoint of step {rewinding.checkpoint.step} was deleted meanwhile, as newer ones are kept: pin it."


def as_wanted(state: State) -> State:
    """The state as it decides where its next generation comes from: one that is to go back has nothing but the
    checkpoint."""
    if state.wanted_rewind is None:
        return state
    return replace(
        state, holdings={}, checkpoint=state.wanted_rewind.checkpoint, older_checkpoints=(), preparation=None
    )


def plan(state: State, source: Source) -> PendingOverrides | None:
    """What the next generation decides, which is formed from `source`; None if nothing was asked for."""
    if not is_wanted(state):
        return None
    decisions, done = state.decisions, max(state.reached, source.step)
    if state.wanted_rewind is not None:
        decisions, done = rewind.decisions_after(state, state.wanted_rewind), source.step
    wanted = state.wanted_rate
    rate = None if wanted is None or _is_undone(state, wanted) else (done + 1, wanted.factor)
    if rate is not None:
        decisions = replace(decisions, rates=changed(decisions.rates, from_step=rate[0], factor=rate[1]))
    return PendingOverrides(decisions=decisions, answers=state.changes_asked, rate=rate, rewind=state.wanted_rewind)


def _is_undone(state: State, wanted: WantedRate) -> bool:
    """Whether going back was asked for after it."""
    return state.wanted_rewind is not None and wanted.number < state.wanted_rewind.number


def decide(state: State) -> Outcome:
    """All members hold the state that the plan was made for: it holds, and is put on record."""
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
    assert records, "a plan has a rate or a way back"
    records[-1] = replace(records[-1], awaited_by=state.generation)  # the journal is written in order
    if wanted is not None and wanted.number <= made.answers:
        state = replace(state, wanted_rate=None)
    if state.wanted_rewind is not None and state.wanted_rewind.number <= made.answers:
        state = replace(state, wanted_rewind=None)
    return replace(state, decisions=made.decisions, plan=None, unrecorded=state.generation), [*records]


# -- refused --


def last_step_is_done(state: State) -> str:
    """Why nothing can be changed any more."""
    return f"the run has done its last step, {state.step}: nothing is computed any more."


def refused_rate(state: State, factor: float, why: str) -> Record:
    """The journal's word to who asked for another learning rate."""
    fields = {"step": state.step, "factor": factor, "reason": why}
    return Record(kind="learning_rate_refused", fields=fields, durable=True)


def refused_rewind(state: State, to_step: int, why: str) -> Record:
    """The journal's word to who wanted to go back."""
    fields = {"step": state.step, "to_step": to_step, "reason": why}
    return Record(kind="rewind_refused", fields=fields, durable=True)

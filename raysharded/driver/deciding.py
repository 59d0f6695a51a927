"""What people decide while the run trains: at a step boundary, on record before it takes effect. Pure.

A decision is asked for; the next generation is formed as if it held; when all members have their state it is written to
the journal; and when it is there for good, the generation trains. So every step that was ever computed with it follows
from the journal, and a decision that is lost with its driver was never taken.
"""

from __future__ import annotations

from dataclasses import replace

from raysharded.driver import undoing
from raysharded.driver.events import Command, Record
from raysharded.driver.messages import Source
from raysharded.driver.outcome import Outcome
from raysharded.driver.state import Plan, State
from raysharded.rates import changed


def is_wanted(state: State) -> bool:
    """Whether something was asked for that is not decided yet."""
    return state.wanted_rate is not None or state.wanted_rewind is not None


def without_impossible(state: State) -> Outcome:
    """Without what was asked for and cannot be had any more."""
    commands: list[Command] = []
    if state.wanted_rate is not None and state.step >= state.limits.max_steps:
        commands.append(refused_rate(state, state.wanted_rate, last_step_is_done(state)))
        state = replace(state, wanted_rate=None)
    rewinding = state.wanted_rewind
    if rewinding is not None:
        why = undoing.refusal(state, rewinding.checkpoint.step)
        if why:
            return without_rewind(state, why, commands)
        still = undoing.wanted(state, rewinding.checkpoint.step, skip_data=rewinding.skip_data)
        state = state if still == rewinding else replace(state, wanted_rewind=still)
    return state, commands


def without_rewind(state: State, why: str, commands: list[Command]) -> Outcome:
    """Without the checkpoint that the run was to go back to; and `commands`, and a word about it."""
    assert state.wanted_rewind is not None
    record = refused_rewind(state, state.wanted_rewind.checkpoint.step, why)
    return replace(state, wanted_rewind=None, plan=None), [*commands, record]


def as_wanted(state: State) -> State:
    """The state as it decides where its next generation comes from: one that is to go back has nothing but the
    checkpoint."""
    if state.wanted_rewind is None:
        return state
    return replace(
        state, holdings={}, checkpoint=state.wanted_rewind.checkpoint, older_checkpoints=(), preparation=None
    )


def plan(state: State, source: Source) -> Plan | None:
    """What the next generation decides, which is formed from `source`; None if nothing was asked for."""
    if not is_wanted(state):
        return None
    decisions, done = state.decisions, max(state.reached, source.step)
    if state.wanted_rewind is not None:
        decisions, done = undoing.decisions_after(state, state.wanted_rewind), source.step
    undone = state.wanted_rewind is not None and state.rate_undone
    rate = None if state.wanted_rate is None or undone else (done + 1, state.wanted_rate)
    if rate is not None:
        decisions = replace(decisions, rates=changed(decisions.rates, from_step=rate[0], factor=rate[1]))
    return Plan(decisions=decisions, rate=rate, rewind=state.wanted_rewind)


def decide(state: State) -> Outcome:
    """All members hold the state that the plan was made for: it holds, and is put on record."""
    made = state.plan
    if made is None:
        return state, []
    commands: list[Command] = []
    step = state.reached
    if made.rewind is not None:
        state, fields = undoing.undo(state, made, made.rewind)
        commands.append(_record(state, "rewind", fields))
        step = state.reached
    if made.rate is not None:
        first, factor = made.rate
        commands.append(_record(state, "learning_rate", {"step": step, "factor": factor, "from_step": first}))
    if made.rate is not None and state.wanted_rate == made.rate[1]:
        state = replace(state, wanted_rate=None)
    if state.wanted_rewind == made.rewind:  # or else somebody wants another one by now
        if made.rewind is not None and state.rate_undone and state.wanted_rate is not None:
            why = f"it is undone: going back to step {step} was asked for after it."
            commands.append(refused_rate(state, state.wanted_rate, why))
            state = replace(state, wanted_rate=None)
        state = replace(state, wanted_rewind=None)
    return replace(state, decisions=made.decisions, plan=None, unrecorded=state.generation), commands


def _record(state: State, kind: str, fields: dict[str, object]) -> Record:
    return Record(kind=kind, fields=fields, durable=True, awaited_by=state.generation)


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

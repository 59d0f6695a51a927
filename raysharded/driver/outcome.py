"""What a handler of the state machine gives: the next state, and the commands that lead there."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from raysharded.driver.commands import Command, End, Record
from raysharded.driver.state import Phase, State

Outcome: TypeAlias = tuple[State, list[Command]]


def then(outcome: Outcome, before: list[Command]) -> Outcome:
    return outcome[0], [*before, *outcome[1]]


def over(state: State, error: BaseException | None = None) -> Outcome:
    fields: dict[str, object] = {"step": state.step, "fingerprint": state.result_fingerprint}
    if error is not None:
        fields["error"] = f"{type(error).__name__}: {error}"
    kind = "failed" if error is not None else "stopped" if state.result_fingerprint is None else "finished"
    return replace(state, phase=Phase.OVER), [Record(kind=kind, fields=fields, durable=True), End(error=error)]

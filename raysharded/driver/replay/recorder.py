"""The state machine with a journal entry for every event, so that the run can be replayed (`driver.replay`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from raysharded.driver import machine
from raysharded.driver.generation import step_reports
from raysharded.driver.replay.names import FORMAT
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Outcome
from raysharded.driver.state.events import Event, WorkerReply
from raysharded.driver.state.state import State
from raysharded.journal.writer import Recorder
from raysharded.protocol.messages import Stopped

BEGINNING = "recording"
"""Kind of the entry that a recording begins with: the first state."""
EVENT = "event"


class Machine(Protocol):
    """The interface that the driver's loop uses: `driver.machine`, or a `Transcript` of it."""

    def begin(self, state: State, at: float) -> Outcome: ...

    def step(self, state: State, event: Event, at: float) -> Outcome: ...


class Transcript:
    """Decides as `driver.machine` does, and records each event that led to a command or another state.

    Used by the driver's thread; the journal's thread turns the records into JSON.
    """

    def __init__(self, recorder: Recorder) -> None:
        from raysharded.driver.replay.encoding import Encoder  # cattrs is loaded by those alone who record or replay

        self._recorder, self._encoder = recorder, Encoder()
        self._count = 0

    def begin(self, state: State, at: float) -> Outcome:
        from raysharded import __version__

        def entry() -> Mapping[str, Any]:
            told = self._encoder.state(_without_reports(state))
            return {"format": FORMAT, "version": __version__, "time": at, **told}

        self._recorder.record(BEGINNING, entry, durable=True)
        return machine.begin(state, at)

    def step(self, state: State, event: Event, at: float) -> Outcome:
        try:
            after, commands = machine.step(state, event, at)
        except Exception as error:
            self._record(state, event, at, raised=f"{type(error).__name__}: {error}")
            raise
        if commands or after is not state:
            self._record(state, event, at)
        return after, commands

    def _record(self, state: State, event: Event, at: float, **more: str) -> None:
        self._count += 1
        number = self._count

        def entry() -> Mapping[str, Any]:
            try:
                told = self._encoder.event(_news(state, event))
            except Exception as error:  # noqa: BLE001 - a recording with a gap must not end the run
                told = {"unwritten": f"{type(event).__name__}: {type(error).__name__}: {error}"}
            return {"number": number, "time": at, **told, **more}

        self._recorder.record(EVENT, entry)


def _news(state: State, event: Event) -> Event:
    """The event without long parts that change nothing: a stopping member repeats its newest steps as a precaution."""
    match event:
        case WorkerReply(message=Stopped() as stopped):
            new = tuple(report for report in stopped.reports if step_reports.is_new(state, report))
            return replace(event, message=replace(stopped, reports=new))
    return event


def _without_reports(state: State) -> State:
    """The state without the reports of adopted workers, which the machine does not read."""
    return replace(state, holdings={worker: replace(held, reports=()) for worker, held in state.holdings.items()})

"""Runs on disk that were recorded by the driver's own transcript and journal, from the events of a test."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from raysharded.checkpoint import open_storage
from raysharded.driver.replay.recorder import Transcript
from raysharded.driver.state.commands import Command, Record
from raysharded.driver.state.events import Event
from raysharded.driver.state.state import State
from raysharded.journal.log import Journal
from raysharded.journal.writer import Recorder
from tests.driver.scripted import Run
from tests.driver.simulated_driver import SimulatedDriver
from tests.driver.test_journal import SetClock

WAIT_S = 20.0


def recorded(folder: Path, run: Run | SimulatedDriver) -> Path:
    """The folder of a run with the events that it received."""
    return record(folder, run.initial, run.log, at=run.began_at if isinstance(run, SimulatedDriver) else 0.0)


def record(folder: Path, state: State, log: Iterable[tuple[Event, float]], writer: str = "d1", at: float = 0.0) -> Path:
    """A run whose driver began at `at` with `state` and then received `log`; ends with the error that it raises."""
    clock = SetClock()
    recorder = Recorder(Journal(open_storage(str(folder)), clock, writer), clock)
    transcript = Transcript(recorder)

    def write(commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Record):
                recorder.record(command.kind, dict(command.fields), durable=command.durable)

    try:
        recorder.record("started", {"driver": writer, "run": "tiny", "resumed_after_step": 0})
        state, commands = transcript.begin(state, at)
        write(commands)
        for event, now in log:
            state, commands = transcript.step(state, event, now)
            write(commands)
    finally:
        recorder.close(WAIT_S)
    return folder

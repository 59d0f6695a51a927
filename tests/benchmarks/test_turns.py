"""Programs that take turns."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.subjects import Session
from benchmarks.turns import OwnTime, halt, seconds, take_turns

pytestmark = pytest.mark.procs

PROGRAM = """
import sys, time
from benchmarks.lines import Speaker
speaker = Speaker(sys.argv[1])
for step in range(1, 100_000):
    time.sleep(0.02)
    speaker.say("step", step=step, loss=0.0)
"""


def test_who_is_halted_does_nothing_and_its_time_stands_still(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with Session() as one, Session() as other:
        for session in (one, other):
            session.spawn([sys.executable, script, session.lines])
            session.wait(lambda session=session: len(session.done()) > 2, 60, "two steps")  # type: ignore[misc]
            halt(session)
        before = [len(session.done()) for session in (one, other)]
        time.sleep(0.2)
        assert [len(session.done()) for session in (one, other)] == before
        turns = take_turns({"one": one, "other": other}, rounds=3, steps=2)
        for name in ("one", "other"):
            assert [len(seconds(turn)) for turn in turns[name]] == [2, 2, 2]
            numbers = [step.step for turn in turns[name] for step in turn]
            assert numbers == sorted(set(numbers))
            assert all(took < 0.2 for turn in turns[name] for took in seconds(turn))  # without the others' turns
        clock = OwnTime()
        for _ in range(2):
            with clock.turn(one):
                time.sleep(0.1)
            time.sleep(0.3)
        assert 0.2 <= clock.now < 0.4
        (_, first), (second, _) = clock.spans
        assert clock.of(first) == clock.of((first + second) / 2) == pytest.approx(clock.of(second))

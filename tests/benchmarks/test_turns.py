"""Programs that take turns."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.subjects import Session
from benchmarks.turns import OwnTime, halt, take_turns

pytestmark = pytest.mark.procs

PROGRAM = """
import sys, time
from benchmarks.lines import Speaker
speaker = Speaker(sys.argv[1])
for step in range(1, 100_000):
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        if sys.argv[2] == "sleeps":
            time.sleep(0.01)
    speaker.say("step", step=step, loss=0.0)
"""


def test_who_is_halted_does_nothing_and_its_time_stands_still(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with Session() as one, Session() as other:
        for session, does in ((one, "works"), (other, "sleeps")):
            session.spawn([sys.executable, script, session.lines, does])
            session.wait(lambda session=session: len(session.done()) > 2, 60, "two steps")  # type: ignore[misc]
            halt(session)
        before = [len(session.done()) for session in (one, other)]
        time.sleep(0.2)
        assert [len(session.done()) for session in (one, other)] == before
        turns = take_turns({"one": one, "other": other}, rounds=3, steps=2)
        for name in ("one", "other"):
            assert [len(turn.seconds) for turn in turns[name]] == [2, 2, 2]
            numbers = [step.step for turn in turns[name] for step in turn.steps]
            assert numbers == sorted(set(numbers))
        for works, sleeps in zip(turns["one"], turns["other"], strict=True):
            assert works.workers_s > 2 * sleeps.workers_s
        spans = {name: [(turn.steps[0].at, turn.steps[-1].at) for turn in turns[name]] for name in turns}
        in_turn = sorted(spans["one"] + spans["other"])
        first_of_round = [in_turn[2 * number] in spans["one"] for number in range(3)]
        assert first_of_round == [True, False, True]
        assert all(end < begin for (_, end), (begin, _) in pairwise(in_turn))  # no step beside another's
        clock = OwnTime()
        for _ in range(2):
            with clock.turn(one):
                time.sleep(0.1)
            time.sleep(0.3)
        (begin, first), (second, end) = clock.spans
        assert clock.now == pytest.approx((end - begin) - (second - first))  # the pause between is not in it
        assert second - first >= 0.3
        assert clock.of(first) == clock.of((first + second) / 2) == pytest.approx(clock.of(second))

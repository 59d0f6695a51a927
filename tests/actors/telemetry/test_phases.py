"""The phase of a worker, and its duration."""

from __future__ import annotations

import time

import pytest

from raysharded.actors.telemetry.phases import Phases
from raysharded.errors import CollectiveAborted
from raysharded.ids import GenerationId


def phases() -> Phases:
    return Phases(GenerationId(1), lambda: False)


def test_the_seconds_of_a_phase_within_another_are_its_own_alone() -> None:
    in_phase, began = phases(), time.perf_counter()
    with in_phase("backward"):
        for _ in range(2):
            with in_phase("reduce"):
                until = time.perf_counter() + 0.02
                while time.perf_counter() < until:
                    pass
    took_s, seconds = time.perf_counter() - began, in_phase.seconds
    assert seconds["reduce"] >= 0.04
    assert 0.0 < seconds["backward"] <= took_s - seconds["reduce"]
    in_phase.restart()
    with in_phase("reduce"):
        pass
    assert list(in_phase.seconds) == ["reduce"]
    assert in_phase.seconds["reduce"] < seconds["reduce"]


def test_the_outer_phase_continues_where_it_began_and_the_last_one_stays() -> None:
    in_phase = phases()
    with in_phase("backward"):
        began = in_phase.since
        with in_phase("reduce"):
            assert in_phase.name == "reduce"
        assert (in_phase.name, in_phase.since) == ("backward", began)
    assert in_phase.name == "backward"


def test_what_fails_leaves_the_phase_that_it_failed_in() -> None:
    in_phase = phases()
    with pytest.raises(ValueError, match="broken"), in_phase("backward"), in_phase("reduce"):
        raise ValueError("broken")
    assert in_phase.name == "reduce"


def test_no_phase_begins_in_a_generation_that_was_aborted() -> None:
    in_phase = Phases(GenerationId(1), lambda: True)
    with pytest.raises(CollectiveAborted, match="before reduce"), in_phase("reduce"):
        pass
    assert in_phase.name == "build"


def test_what_is_done_apart_counts_as_one_phase_and_no_longer_than_it_lasts() -> None:
    in_phase = phases()
    seen = []

    def fail() -> None:
        with in_phase.apart("prove"), in_phase("forward"):
            seen.append(in_phase.name)
            raise ValueError("within")

    with pytest.raises(ValueError, match="within"):
        fail()
    assert seen == ["prove"]
    assert list(in_phase.seconds) == ["prove"]
    with in_phase("forward"):
        assert in_phase.name == "forward"
    assert list(in_phase.seconds) == ["prove", "forward"]


def test_an_abort_ends_what_is_done_apart_at_the_next_phase_in_it() -> None:
    aborted = False
    in_phase = Phases(GenerationId(1), lambda: aborted)
    with in_phase.apart("prove"):
        aborted = True
        with pytest.raises(CollectiveAborted, match="aborted before forward"), in_phase("forward"):
            pass

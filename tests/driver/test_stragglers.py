"""A worker that slows the others down is found by what it does not wait, compared with its peers."""

from __future__ import annotations

from hypothesis import given, strategies as st

from raysharded.driver.state import stragglers
from raysharded.driver.state.stragglers import StepTimes
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.messages import ProbeReply

SECONDS = st.floats(0.01, 10.0)


def seen(data: float, forward: float, *, steps: int = 20) -> ProbeReply:
    return ProbeReply(
        generation=GenerationId(1),
        step=9,
        phase="forward",
        phase_s=0.1,
        waits=False,
        stack="",
        busy={"data": data, "forward": forward},
        num_steps=steps,
    )


def of(*each: ProbeReply) -> dict[WorkerId, ProbeReply]:
    return {WorkerId(number): one for number, one in enumerate(each)}


def test_the_slow_one_is_found_with_the_phase_in_which_it_loses_time() -> None:
    paces = stragglers.paces_of(of(seen(0.1, 0.9), seen(0.6, 1.0), seen(0.1, 0.9)))
    slow = paces[WorkerId(1)]
    assert (round(slow.score, 6), slow.phase, round(slow.lost_s, 6)) == (1.6, "data", 0.6)
    assert paces[WorkerId(0)].score == 1.0


def test_of_two_the_slower_one_is_found() -> None:
    paces = stragglers.paces_of(of(seen(0.1, 0.5), seen(0.1, 1.1)))
    assert (paces[WorkerId(0)].score, round(paces[WorkerId(1)].score, 6)) == (1.0, 2.0)


def test_nobody_is_judged_by_a_few_steps() -> None:
    assert stragglers.paces_of(of(seen(0.1, 0.9), seen(0.6, 1.0, steps=2))) == {}


def test_it_is_reported_when_somebody_is_slow_again_and_again_and_not_every_time() -> None:
    found = stragglers.paces_of(of(seen(0.1, 0.9), seen(0.6, 1.0), seen(0.1, 0.9)))
    well = stragglers.paces_of(of(seen(0.1, 0.9), seen(0.1, 0.9), seen(0.1, 0.9)))
    paces, said = StepTimes(), []
    for looks in [found, found, well, found, found, found, found, found, found]:
        paces, told = stragglers.judged(paces, looks, step_s=1.6)
        said.append(told)
    assert said == [[], [], [], [], [], [1], [], [], [1]]


def test_differences_that_are_noise_are_not_mentioned() -> None:
    found = stragglers.paces_of(of(seen(0.001, 0.002), seen(0.001, 0.005)))
    assert not any(stragglers.judged(StepTimes(slow={WorkerId(1): 2}), found, step_s=0.01)[1:][0])


def test_a_healthy_worker_is_not_blamed_for_steps_that_wait_for_a_slow_network() -> None:
    """Steps of 25 s, in which four workers compute for less than a second and wait for a slow link."""
    found = stragglers.paces_of(of(seen(0.1, 0.8), seen(0.1, 0.6), seen(0.1, 0.6), seen(0.1, 0.5)))
    assert found[WorkerId(0)].score > stragglers.SLOW
    almost = StepTimes(slow={WorkerId(0): 2})
    assert stragglers.judged(almost, found, step_s=25.0)[1] == []
    assert stragglers.judged(almost, found, step_s=1.0)[1] == [0]


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=9))
def test_at_least_half_are_never_slow(seconds: list[tuple[float, float]]) -> None:
    paces = stragglers.paces_of(of(*(seen(data, forward) for data, forward in seconds)))
    slow = [worker for worker, pace in paces.items() if pace.score > stragglers.SLOW]
    assert len(slow) <= len(seconds) / 2


@given(st.integers(2, 100_000), st.floats(0.1, 100))
def test_thousands_of_workers_are_queried_seldom(members: int, every_s: float) -> None:
    due = next(at for at in range(1, 100_000) if stragglers.is_due(StepTimes(), members, every_s, float(at)))
    assert due >= every_s
    assert members / due <= 20

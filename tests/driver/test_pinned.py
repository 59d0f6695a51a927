"""Histories in which a takeover went wrong once. Their course depends on the order of the simulation's delays: when
that changes they are ordinary histories, and others must be found for the cases that they were pinned for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raysharded.driver.state.state import Phase
from tests.driver.schedules import BASE, Schedule
from tests.driver.strikes import Fault, Strike
from tests.driver.test_simulation import run

LATE_SEGMENT = Schedule(
    limits=replace(
        BASE,
        max_workers=4,
        max_steps=3,
        save_at_end=False,
        replacement_wait_s=4.0,
        rewind=True,
        max_failed_saves=1,
        stop_on_failed_saves=True,
    ),
    later_workers=None,
    save_every=1,
    resumed=True,
    tick_s=0.25,
    seed=2194490707,
    faults=(
        Fault(strike=Strike.KILL, whom=5, nth=46, phase=Phase.GATHERING),
        Fault(strike=Strike.DRIVER_STOPS, whom=0, nth=1, phase=Phase.TRAINING),
    ),
)
"""A segment of the older driver arrived after the newer one had read the journal: a step was there twice."""

LATE_LAST_WORDS = Schedule(
    limits=replace(
        BASE, min_workers=4, max_workers=5, max_steps=3, spares=1, max_failed_saves=1, stop_on_failed_saves=True
    ),
    later_workers=None,
    save_every=3,
    resumed=False,
    tick_s=1.0,
    seed=718198060,
    faults=(
        Fault(strike=Strike.KILL, whom=2, nth=44, phase=Phase.TRAINING),
        Fault(strike=Strike.DRIVER_DIES, whom=0, nth=58, phase=Phase.TRAINING),
        Fault(strike=Strike.KILL, whom=1, nth=3, phase=Phase.FORMING),
    ),
)
"""Workers wrote to the journal, after their last checkpoint, when another driver had come."""

ENDING = Schedule(
    limits=replace(
        BASE,
        min_workers=2,
        max_workers=5,
        max_steps=3,
        rewind=True,
        max_node_failures=2,
        max_failed_saves=1,
        stop_on_failed_saves=True,
    ),
    later_workers=None,
    save_every=1,
    resumed=True,
    tick_s=1.0,
    seed=4033035489,
    faults=(Fault(strike=Strike.DRIVER_DIES, whom=0, nth=2, phase=Phase.TRAINING),),
)
"""A driver came while workers wrote their last checkpoint: they refused it, and were ended with what they held."""

FEWER = Schedule(
    limits=replace(
        BASE,
        min_workers=2,
        max_workers=3,
        max_steps=6,
        max_worker_losses=2,
        max_node_failures=2,
        max_failed_saves=1,
        stop_on_failed_saves=True,
    ),
    later_workers=1,
    save_every=1,
    resumed=True,
    tick_s=1.0,
    seed=1072980811,
    faults=(Fault(strike=Strike.DRIVER_DIES, whom=3, nth=2, phase=Phase.TRAINING),),
)
FEWER_AND_A_SPARE = Schedule(
    limits=replace(
        BASE,
        max_workers=2,
        spares=1,
        replacement_wait_s=4.0,
        max_worker_losses=2,
        max_node_failures=2,
        stop_on_failed_saves=True,
    ),
    later_workers=1,
    save_every=3,
    resumed=False,
    tick_s=1.0,
    seed=3546091863,
    faults=(
        Fault(strike=Strike.KILL, whom=0, nth=2, phase=Phase.FORMING),
        Fault(strike=Strike.DRIVER_DIES, whom=0, nth=13, phase=None),
    ),
)
"""The next driver may have fewer workers than hold the state."""

ONE_NUMBER = Schedule(
    limits=replace(BASE, max_steps=6, save_at_end=False, replacement_wait_s=4.0, max_node_failures=1),
    later_workers=None,
    save_every=1,
    resumed=True,
    tick_s=1.0,
    seed=1633328555,
    faults=(
        Fault(strike=Strike.DRIVER_STOPS, whom=3, nth=3, phase=None),
        Fault(strike=Strike.KILL, whom=0, nth=11, phase=None),
        Fault(strike=Strike.DRIVER_DIES, whom=3, nth=2, phase=Phase.CLOSING),
        Fault(strike=Strike.KILL, whom=4, nth=18, phase=Phase.FORMING),
    ),
)
"""A driver that was followed woke up and started a worker of the same number as one of its follower's."""


WRONG_AND_COMMITTED = Schedule(
    limits=replace(BASE, max_steps=6, max_failed_saves=1),
    later_workers=None,
    save_every=3,
    resumed=False,
    tick_s=0.25,
    seed=854,
    faults=(
        Fault(strike=Strike.DRIVER_DIES, whom=0, nth=9, phase=Phase.FORMING),
        Fault(strike=Strike.CORRUPT, whom=0, nth=42, phase=None),
    ),
)
"""A checkpoint was about to be committed when an audit found its steps wrong, and the driver died."""

ALL = [LATE_SEGMENT, LATE_LAST_WORDS, ENDING, FEWER, FEWER_AND_A_SPARE, ONE_NUMBER, WRONG_AND_COMMITTED]


@pytest.mark.parametrize("schedule", ALL)
def test_a_history_that_once_went_wrong_ends_well(schedule: Schedule) -> None:
    cluster = run(schedule)
    assert len(cluster.drivers) > 1

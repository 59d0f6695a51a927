"""Histories of a run on a simulated cluster, as they are drawn: the run's settings, and the faults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from hypothesis import strategies as st

from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.driver.state.state import Phase
from tests.driver.simulated import Cluster
from tests.driver.strikes import Fault, Strike


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One history: the run's settings, the faults, and the seed of every delay."""

    limits: DriverConfig
    later_workers: int | None
    """The most workers that the drivers after the first one may have; None: as many."""
    save_every: int | None
    resumed: bool
    tick_s: float
    seed: int
    faults: tuple[Fault, ...]

    def cluster(self) -> Cluster:
        limits = replace(self.limits, save_every_steps=self.save_every) if self.limits.rewind else self.limits
        return Cluster(
            limits,
            later_workers=self.later_workers,
            resumed=self.resumed,
            save_every=self.save_every,
            seed=self.seed,
            tick_s=self.tick_s,
            faults=self.faults,
        )


BASE = DriverConfig(
    min_workers=1,
    max_workers=1,
    max_steps=2,
    exact=True,
    mirrors=True,
    save_at_end=True,
    start_timeout_s=120.0,
    replacement_wait_s=0.0,
    max_worker_losses=None,
    task_error_retries=1,
    global_batch_size=4,
    progress_timeout_s=150.0,  # each longer than the simulated delays add up to
    hang_timeout_s=100.0,
    forming_patience_s=100.0,
    stopping_patience_s=60.0,
    stop_timeout_s=60.0,
    form_timeout_s=150.0,
    save_timeout_s=150.0,
)

FAULTS = st.builds(
    Fault,
    strike=st.sampled_from(
        [Strike.KILL] * 6
        + [Strike.RATE] * 3
        + [Strike.REWIND] * 4
        + [Strike.RESHARD, Strike.PAUSE, Strike.RESIZE] * 2
        + [Strike.NODE] * 2
        + [Strike.FREEZE] * 2
        + [Strike.DRIVER_DIES] * 6
        + [Strike.DRIVER_STOPS] * 3
        + [strike for strike in Strike if strike is not Strike.DEVICE]
    ),
    whom=st.integers(0, 6),
    nth=st.one_of(st.integers(0, 3), st.integers(0, 60)),
    phase=st.sampled_from([None, None, *(phase for phase in Phase if phase is not Phase.OVER)]),
)


IN_TRAINING = [None, Phase.TRAINING]
LATE_FAULTS = st.builds(
    Fault,
    strike=st.sampled_from(
        [Strike.KILL, Strike.FREEZE] * 3
        + [Strike.SILENCE, Strike.FAIL_SAVE, Strike.DRIVER_DIES, Strike.DRIVER_STOPS, Strike.NODE]
    ),
    whom=st.integers(0, 6),
    nth=st.integers(20, 500),
)


def _planned(grouping: Grouping, random: Random) -> Grouping:
    """The grouping with any times of steps, and any meshes that fit."""
    rows = [range(5 // shards) for shards in range(1, 6)]
    return replace(
        grouping,
        step_s=tuple(tuple(random.choice([1.0, 1.01, 2.0]) for _ in row) for row in rows),
        fits=tuple(tuple(random.random() < 0.5 for _ in row) for row in rows),
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    tensor = draw(st.sampled_from([1, 1, 1, 2, 2, 3]))
    most = draw(st.integers(tensor, 5 if tensor == 1 else 6))
    least = draw(st.integers(tensor, most))
    grouping: st.SearchStrategy[Grouping | None] = st.builds(
        Grouping,
        shards=st.integers(1, 3),
        least_shards=st.integers(1, 2),
        least_workers=st.just(least),
        num_microbatches=st.sampled_from([1, 8]),
    )
    if tensor > 1:
        shards = draw(st.sampled_from([None, tensor, 2 * tensor]))
        grouping = grouping.map(lambda one: one and replace(one, tensor=tensor, shards=shards))
    elif draw(st.booleans()):
        grouping = st.builds(_planned, grouping, st.randoms(use_true_random=False))
    limits = replace(
        BASE,
        min_workers=least,
        max_workers=most,
        max_steps=draw(st.integers(2, 7)),
        spares=draw(st.sampled_from([0, 0, 1])),
        mirrors=draw(st.sampled_from([True, False])),
        grouping=draw(grouping if tensor > 1 else st.one_of(st.none(), grouping)),
        save_at_end=draw(st.sampled_from([True, True, True, False])),
        replacement_wait_s=draw(st.sampled_from([0.0, 0.0, 4.0])),
        max_worker_losses=draw(st.sampled_from([None, None, 2])),
        rewind=draw(st.booleans()),
        prepare_within_s=draw(st.sampled_from([0.0, 5.0, 30.0, 30.0])),
        max_node_failures=draw(st.sampled_from([None, 1, 2])),
        max_failed_saves=draw(st.sampled_from([1, 3])),
        stop_on_failed_saves=draw(st.sampled_from([False, False, True])),
        proves_first_step=draw(st.booleans()),
    )
    return Schedule(
        limits=limits,
        later_workers=draw(st.one_of(st.none(), st.none(), st.integers(tensor, most))),
        save_every=draw(st.sampled_from([None, 1, 2, 3])),
        resumed=draw(st.booleans()),
        tick_s=draw(st.sampled_from([0.25, 1.0])),
        seed=draw(st.integers(0, 2**32 - 1)),
        faults=tuple(draw(st.lists(FAULTS, max_size=6))),
    )


@st.composite
def left_alone(draw: st.DrawFn) -> Schedule:
    """Histories that strike workers without a driver, and while another one comes."""
    ends = st.sampled_from([Strike.DRIVER_DIES] * 3 + [Strike.DRIVER_STOPS])
    first = Fault(strike=draw(ends), whom=0, nth=draw(st.integers(5, 60)), phase=draw(st.sampled_from(IN_TRAINING)))
    return replace(draw(schedules()), faults=(first, *draw(st.lists(LATE_FAULTS, max_size=5))))


@st.composite
def cut_apart(draw: st.DrawFn) -> Schedule:
    """Histories in which links between nodes are cut, for a while or until the end, among other faults."""
    cut = st.builds(
        Fault,
        strike=st.just(Strike.CUT),
        whom=st.integers(0, 6),
        nth=st.integers(0, 60),
        phase=st.sampled_from([Phase.TRAINING, Phase.TRAINING, Phase.FORMING, None]),
    )
    schedule = draw(schedules())
    number, nodes = draw(st.integers(0, 2**30)), draw(st.sampled_from([2, 3, 3]))  # the seed decides how many nodes
    limits = replace(schedule.limits, max_steps=draw(st.integers(5, 12)))
    if limits.tensor == 1:
        least, grouping = draw(st.integers(1, 3)), limits.grouping
        grouping = grouping and replace(grouping, least_workers=least)
        limits = replace(limits, max_workers=draw(st.integers(3, 6)), min_workers=least, grouping=grouping)
    faults = (*draw(st.lists(cut, min_size=1, max_size=4)), *draw(st.lists(FAULTS, max_size=3)))
    return replace(schedule, limits=limits, seed=3 * number + nodes - 1, faults=faults)


@st.composite
def below_the_minimum(draw: st.DrawFn) -> Schedule:
    """Histories in which two nodes are cut off from each other, and neither has enough workers to continue."""
    cut = Fault(strike=Strike.CUT, whom=draw(st.integers(0, 3)), nth=draw(st.integers(5, 20)), phase=Phase.TRAINING)
    schedule = draw(schedules())
    grouping = Grouping(shards=1, least_shards=1, num_microbatches=8, tensor=1, least_workers=4)
    limits = replace(
        schedule.limits,
        grouping=grouping,
        mirrors=True,
        parity=None,
        min_workers=4,
        max_workers=4,
        max_steps=draw(st.integers(10, 14)),
    )
    seed = 3 * draw(st.integers(0, 2**30)) + 1  # two nodes
    faults = (cut, *draw(st.lists(LATE_FAULTS, max_size=1)))
    return replace(schedule, limits=limits, later_workers=None, seed=seed, faults=faults)


@st.composite
def handing_over(draw: st.DrawFn) -> Schedule:
    """Histories in which one worker of a run survives, and its replacements do not all reach it.

    The replacements are enough to continue and hold nothing; the survivor reaches only one of them.
    """
    schedule = draw(schedules())
    grouping = Grouping(shards=1, least_shards=1, num_microbatches=8, tensor=1, least_workers=3)
    limits = replace(
        schedule.limits,
        grouping=grouping,
        min_workers=3,
        max_workers=4,
        max_steps=draw(st.integers(8, 12)),
        spares=0,
        max_worker_losses=None,
        max_node_failures=None,
    )
    when, survivor = draw(st.integers(15, 40)), draw(st.sampled_from([1, 2]))  # two replacements come to the first node
    deaths = [
        Fault(strike=Strike.KILL, whom=0 if nth < survivor else 1, nth=when, phase=Phase.TRAINING) for nth in range(3)
    ]
    cut = Fault(strike=Strike.CUT, whom=survivor - 1, nth=0, phase=Phase.STOPPING)
    seed = 3 * draw(st.integers(0, 2**30)) + 2  # three nodes
    faults = (*deaths, cut, *draw(st.lists(LATE_FAULTS, max_size=1)))
    return replace(schedule, limits=limits, later_workers=None, seed=seed, faults=faults)


@st.composite
def deciding(draw: st.DrawFn) -> Schedule:
    """Histories in which people change the decisions, and roll back, again and again."""
    asked = st.builds(
        Fault,
        strike=st.sampled_from([Strike.REWIND] * 3 + [Strike.RATE] * 3 + [Strike.UNREADABLE]),
        whom=st.integers(0, 6),
        nth=st.integers(0, 80),
        phase=st.sampled_from([Phase.TRAINING] * 4 + [Phase.FORMING, Phase.STOPPING, None]),
    )
    schedule = draw(schedules())
    return replace(
        schedule,
        limits=replace(schedule.limits, max_steps=draw(st.integers(5, 12))),
        save_every=draw(st.sampled_from([1, 2, 3])),
        faults=(
            *draw(st.lists(asked, min_size=1, max_size=6)),
            *draw(st.lists(FAULTS, max_size=2)),
            *draw(st.lists(LATE_FAULTS, max_size=2)),
        ),
    )


@st.composite
def with_dead_devices(draw: st.DrawFn) -> Schedule:
    """Histories in which the GPU of a worker fails, and another worker dies at about the same time."""
    faults = st.builds(
        Fault,
        strike=st.sampled_from(
            [Strike.DEVICE] * 4 + [Strike.KILL] * 2 + [Strike.BREAK, Strike.FREEZE, Strike.NOTICE, Strike.DRIVER_DIES]
        ),
        whom=st.integers(0, 6),
        nth=st.integers(0, 60),
        phase=st.sampled_from([Phase.TRAINING, Phase.TRAINING, Phase.FORMING, Phase.STOPPING, Phase.GATHERING]),
    )
    when, who = draw(st.integers(5, 40)), draw(st.integers(0, 6))
    first = Fault(strike=Strike.DEVICE, whom=who, nth=when, phase=Phase.TRAINING)
    at, nth = draw(st.sampled_from([(Phase.TRAINING, when + 2), (Phase.STOPPING, 1), (Phase.FORMING, 20)]))
    second = Fault(strike=Strike.KILL, whom=who + draw(st.integers(1, 3)), nth=nth, phase=at)
    schedule, least = draw(schedules()), draw(st.integers(1, 3))
    limits = replace(schedule.limits, mirrors=True, max_steps=draw(st.integers(5, 12)), max_worker_losses=None)
    if limits.tensor == 1:
        grouping = limits.grouping and replace(limits.grouping, shards=3, least_workers=least)
        limits = replace(limits, max_workers=draw(st.integers(3, 5)), min_workers=least, grouping=grouping)
    return replace(schedule, limits=limits, faults=(first, second, *draw(st.lists(faults, max_size=4))))


CONTROLS = [Strike.PAUSE, Strike.RESIZE]
CONTROLLED = st.builds(
    Fault,
    strike=st.sampled_from(
        [*CONTROLS * 4, Strike.DRAIN, Strike.ASK, Strike.RESHARD, Strike.LEAVE]
        + [Strike.KILL, Strike.NOTICE, Strike.NOTICE_NODE, Strike.FREEZE, Strike.DRIVER_DIES] * 2
    ),
    whom=st.integers(0, 6),
    nth=st.one_of(st.integers(0, 4), st.integers(0, 80)),
    phase=st.sampled_from([None, Phase.PAUSED, Phase.PAUSED, Phase.FORMING, Phase.TRAINING, Phase.STOPPING]),
)


@st.composite
def controlled(draw: st.DrawFn) -> Schedule:
    """Histories in which people request pauses and other numbers of workers, during all other faults."""
    first = st.builds(Fault, strike=st.sampled_from(CONTROLS), whom=st.integers(0, 6), nth=st.integers(0, 60))
    return replace(draw(schedules()), faults=(draw(first), *draw(st.lists(CONTROLLED, max_size=8))))


@st.composite
def well_controlled(draw: st.DrawFn) -> Schedule:
    """Histories of such requests, without any faults; every step is held twice."""
    schedule = draw(schedules())
    faults = st.builds(
        Fault,
        strike=st.sampled_from([*CONTROLS, Strike.ASK]),
        whom=st.integers(0, 6),
        nth=st.integers(0, 80),
        phase=st.sampled_from([None, Phase.PAUSED, Phase.FORMING, Phase.TRAINING, Phase.STOPPING]),
    )
    limits = replace(schedule.limits, mirrors=True, min_workers=max(2, schedule.limits.min_workers), max_workers=6)
    return replace(schedule, limits=limits, faults=tuple(draw(st.lists(faults, min_size=1, max_size=8))))

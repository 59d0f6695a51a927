"""The cost of a step compared with a plain FSDP2 loop, at 2 and 4 workers; and the phases of its time.

All subjects of a case are started, and then take turns of a few steps (`benchmarks.turns`); the figure of a round is
the median of its steps. raysharded and Ray Train run on a Ray of one node each, the plain loop under torchrun.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from benchmarks.effort import Effort
from benchmarks.result import Line, ratios
from benchmarks.subjects import (
    RAY_TRAIN as RAY_TRAIN_FIXED,
    NotSeen,
    Session,
    spawn_ours,
    spawn_ray_train,
    wait_until_settled,
)
from benchmarks.turns import PATIENCE_S, Turn, halt, take_turns
from benchmarks.workload import SHAPES
from raysharded.checkpoint import open_storage
from raysharded.journal import log

NAME = "steps"
PLAIN = "torchrun, plain FSDP2"
RAY_TRAIN = "Ray Train"
_WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One setting of raysharded."""

    name: str
    options: tuple[str, ...] = ()
    """Options of `benchmarks.ours`."""
    asked: str | None = None


EXACT = Way(name="raysharded, exact, mirrors", asked="at most 1.05")
EXACT_ALONE = Way(name="raysharded, exact, no mirrors", options=("--no-mirrors",))
FAST = Way(name="raysharded, fast, mirrors", options=("--reduction", "fast"))
FAST_ALONE = Way(
    name="raysharded, fast, no mirrors", options=("--reduction", "fast", "--no-mirrors"), asked="at most 1.01"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One size of the model and of the run."""

    parameters: str
    workers: int
    ways: tuple[Way, ...]
    rounds: int
    steps_of_a_turn: int = 2
    ray_train: bool = True
    """True if Ray Train takes part."""
    reduced_once: bool = False
    """True to reduce each step once, from whole gradients, in the plain loop too; otherwise for every microbatch."""
    name: str = ""
    """Distinguishes cases of one size."""

    @property
    def what(self) -> str:
        size = f"step, {self.parameters} parameters, {self.workers} workers"
        return f"{size}, {self.name}" if self.name else size


def cases(rounds: int) -> list[Case]:
    """The cases of 5M parameters."""
    ways = (EXACT, EXACT_ALONE, FAST, FAST_ALONE)
    once = Case(
        parameters="5M",
        workers=4,
        ways=(EXACT,),
        rounds=rounds,
        ray_train=False,
        reduced_once=True,
        name="reduced once",
    )
    usual = Case(parameters="5M", workers=4, ways=ways, rounds=rounds)
    with_two = 2 * rounds  # the goal there is within one percent, and turns differ by five
    return [
        replace(case, workers=workers, rounds=number)
        for case in (usual, once)
        for workers, number in ((4, rounds), (2, with_two))
    ]


def run(effort: Effort) -> list[Line]:
    """All lines: twenty minutes when full."""
    if effort is Effort.QUICK:
        return lines_of([Case(parameters="5M", workers=2, ways=(EXACT, FAST_ALONE), rounds=1)], NAME)
    return lines_of(cases(rounds=effort.pick(quick=1, hour=3, full=12)), NAME)


def lines_of(cases: Sequence[Case], benchmark: str) -> list[Line]:
    """The measurements of some cases, as lines of this benchmark."""
    return [replace(line, benchmark=benchmark) for case in cases for line in measured_or_why_not(case)]


def measured_or_why_not(case: Case) -> list[Line]:
    """Measure a case; if it fails, one line with the reason, so that the lines of other cases stay."""
    try:
        return measured(case)
    except NotSeen as late:
        print(late, file=sys.stderr, flush=True)
        note = str(late).partition("\n")[0]
        return [Line(benchmark=NAME, what=case.what, subject=PLAIN, unit="s", values=[], note=note)]


def measured(case: Case) -> list[Line]:
    """One case, all of its subjects in turn."""
    starts: dict[str, Callable[[Session], object]] = {PLAIN: lambda session: spawn_plain(session, case)}
    for way in case.ways:
        starts[way.name] = lambda session, way=way: start_ours(session, case, way)  # type: ignore[misc]  # bound at once
    if case.ray_train and RAY_TRAIN_FIXED.is_installed:
        starts[RAY_TRAIN] = lambda session: start_ray_train(session, case)
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}
        for name, start in starts.items():
            sessions[name] = session = stack.enter_context(Session())
            start(session)
            wait_until_settled(session, name, workers=case.workers, steps=_WARM_UP_STEPS)
            halt(session)
        turns = take_turns(sessions, case.rounds, case.steps_of_a_turn)
        phases = {way.name: phases_of(sessions[way.name], turns[way.name]) for way in case.ways}
    found = {name: [statistics.median(turn.seconds) for turn in ones] for name, ones in turns.items()}
    asked = {way.name: way.asked for way in case.ways}
    lines = [
        Line(
            benchmark=NAME,
            what=case.what,
            subject=name,
            unit="s",
            values=values,
            ratio=None if name == PLAIN else ratios(values, found[PLAIN]),
            against="" if name == PLAIN else "times the plain loop",
            asked=asked.get(name),
        )
        for name, values in found.items()
    ]
    if case.ray_train and RAY_TRAIN not in found:
        note = "its environment is not there: `make peers` makes it"
        lines.append(Line(benchmark=NAME, what=case.what, subject=RAY_TRAIN, unit="s", values=[], note=note))
    lines += processor_lines(case, turns)
    return lines + [line for way in case.ways for line in where_it_goes(case, way, phases[way.name])]


def processor_lines(case: Case, turns: Mapping[str, Sequence[Turn]]) -> list[Line]:
    """Processor time of a step: of the workers, all together, and of the other processes of the run."""
    found = {
        "processor time of the workers": {name: [turn.workers_s for turn in ones] for name, ones in turns.items()},
        "processor time of all processes": {
            name: [turn.workers_s + turn.others_s for turn in ones] for name, ones in turns.items()
        },
    }
    return [
        Line(
            benchmark=NAME,
            what=f"{case.what}: {what}",
            subject=name,
            unit="s",
            values=values,
            ratio=None if name == PLAIN else ratios(values, by_name[PLAIN]),
            against="" if name == PLAIN else "times the plain loop",
        )
        for what, by_name in found.items()
        for name, values in by_name.items()
    ]


def where_it_goes(case: Case, way: Way, rounds: Sequence[Mapping[str, float]]) -> list[Line]:
    """The phases of a step in their order, of the worker that reports it."""
    names = dict.fromkeys(name for one in rounds for name in one)
    return [
        Line(
            benchmark=NAME,
            what=f"{case.what}: {name}",
            subject=way.name,
            unit="s",
            values=[one.get(name, 0.0) for one in rounds],
        )
        for name in names
    ]


def phases_of(session: Session, turns: Sequence[Turn]) -> list[dict[str, float]]:
    """Medians of the phases of each turn's steps, from the journal of our run; it is a few steps behind when the last
    turn ends."""
    entries = log.read(open_storage(str(session.storage / "ours")))
    of_step = {entry["step"]: entry["seconds"] for entry in entries if entry["kind"] == "step"}
    found = []
    for turn in turns:
        known = [of_step[one.step] for one in turn.steps[1:] if one.step in of_step]
        names = dict.fromkeys(name for one in known for name in one)
        if known:
            found.append({name: statistics.median(one.get(name, 0.0) for one in known) for name in names})
    return found


def spawn_plain(session: Session, case: Case) -> None:
    """The plain loop."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={case.workers}", "--standalone"]
    command += ["-m", "benchmarks.peers.plain_fsdp2", f"--parameters={case.parameters}", f"--out={session.lines}"]
    session.spawn([*command, *["--no-sync"] * case.reduced_once])


def start_ours(session: Session, case: Case, way: Way) -> None:
    """Start raysharded, with the notice that its processes may be stopped; without checkpoints."""
    shape = ["--workers", str(case.workers), "--least", str(case.workers), "--parameters", case.parameters]
    shape += ["--accumulation", "local"] * case.reduced_once
    spawn_ours(session, *shape, "--patience-s", str(PATIENCE_S), *way.options, every=0)


def start_ray_train(session: Session, case: Case) -> None:
    """Ray Train, without checkpoints."""
    shape = SHAPES[case.parameters]
    numbers = ",".join(str(shape[name]) for name in ("layers", "width", "heads"))
    spawn_ray_train(session, "--workers", str(case.workers), "--shape", numbers, every=0)

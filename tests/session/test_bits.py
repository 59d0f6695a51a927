"""A user's loop gives the bits of `fit()` with the same model, at every size and after every loss."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from raysharded.driver.driver import Driver
from raysharded.task import TrainFunction
from raysharded.testing.faults import PHASES
from tests.cases import tried_each_time
from tests.session.loops import MICROBATCHES, STEPS, Average, Loop, by_task, compute, optimizer_of, run
from tests.training.harness import (
    Gpt,
    GptTask,
    Outcome,
    Small,
    SmallTask,
    TwoBlocksTask,
    make_driver,
    make_limits,
    train,
)
from tests.training.test_checkpoints import Listening, fingerprint, resume, small_job
from tests.training.test_generations import eventually
from tests.training.test_leaving import Seen, a_job, drive

pytestmark = pytest.mark.procs


def two_blocks() -> nn.Module:
    return Gpt(2)


@cache
def two_blocks_by_task(steps: int = STEPS) -> Outcome:
    return train(1, task=TwoBlocksTask(), microbatches=MICROBATCHES, steps=steps)


@pytest.mark.parametrize("workers", tried_each_time([3], [1, 2, 3, 5, 8]))
def test_a_loop_has_the_bits_of_a_task_at_every_number_of_workers(workers: int) -> None:
    steps = 4 if workers == 3 else STEPS
    assert run(workers, Loop(two_blocks), steps=steps).bits == two_blocks_by_task(steps).bits


KILLS = {
    "ready": [(2, 0, "ready")],
    "form": [(2, 1, "form")],
    "transfer": [(1, 2, "agree"), (2, 1, "transfer")],  # after the loss before it
    **{phase: [(1, 3, phase)] for phase in ("data", "forward", "backward", "agree", "apply", "snapshot", "save")},
}


IN_ONE_RUN = [
    [(2, 0, "ready"), (1, 2, "forward"), (3, 3, "save"), (4, 5, "snapshot")],
    [(2, 1, "form"), (1, 3, "data"), (3, 4, "apply")],
    [(1, 2, "agree"), (2, 1, "transfer"), (3, 3, "backward")],
]


@pytest.mark.parametrize("kills", tried_each_time(IN_ONE_RUN[-1:], IN_ONE_RUN))
def test_workers_that_are_killed_in_several_phases_change_no_bit(kills: list[tuple[int, int, str]]) -> None:
    steps = 1 + max(step for _, step, _ in kills)
    of_loop = run(len(kills) + 1, Loop(two_blocks), kills=kills, save_every=3, steps=steps)
    assert of_loop.bits == two_blocks_by_task(steps).bits


@pytest.mark.long  # each phase alone
@pytest.mark.parametrize("phase", KILLS)
def test_a_worker_that_is_killed_in_any_phase_changes_no_bit(phase: str) -> None:
    assert run(3, Loop(two_blocks), kills=KILLS[phase], save_every=3).bits == two_blocks_by_task().bits


def test_there_is_a_kill_in_every_phase() -> None:
    assert set(KILLS) == {phase for kills in IN_ONE_RUN for *_, phase in kills} == set(PHASES)


class Wrapped(Loop):
    """Names its units."""

    def __call__(self, session: Session) -> None:
        shard = session.shard
        session.shard = lambda *args, **others: shard(*args, **others, wrap=blocks_and_head)  # type: ignore[method-assign]
        super().__call__(session)


def blocks_and_head(model: nn.Module) -> list[nn.Module]:
    return [*model.get_submodule("blocks").children(), model.get_submodule("norm")]


@pytest.mark.parametrize(
    ("loop", "workers", "kill", "settings", "others"),
    [
        (Wrapped(), 2, (1, 2, "agree"), {"param_dtype": "bfloat16"}, {}),
        pytest.param(Loop(), 3, (2, 3, "backward"), {"param_dtype": "bfloat16"}, {}, marks=pytest.mark.long),
        pytest.param(Wrapped(), 3, (1, 2, "forward"), {}, {}, marks=pytest.mark.long),
        pytest.param(Loop(), 4, (3, 2, "backward"), {}, {"shards": 2}, marks=pytest.mark.long),
        pytest.param(
            Loop(), 4, (1, 2, "apply"), {"redundancy": rs.Redundancy(parity=(2, 1))}, {}, marks=pytest.mark.long
        ),
    ],
    ids=["bfloat16 and units", "bfloat16", "units", "shard groups", "parity"],
)
def test_settings_of_a_loop_have_the_bits_that_a_task_has_with_them(
    loop: Loop, workers: int, kill: tuple[int, int, str], settings: dict[str, Any], others: dict[str, Any]
) -> None:
    engine = rs.EngineConfig(**settings)
    of_loop = run(workers, loop, engine=engine, kills=[kill], steps=3, **others)
    dtype = {key: value for key, value in settings.items() if key == "param_dtype"}
    of_task = train(1, engine=rs.EngineConfig(**dtype), microbatches=MICROBATCHES, steps=3)
    assert of_loop.bits == of_task.bits
    assert (of_task.bits == by_task(3).bits) == (not dtype)
    assert len(of_loop.of("recovery")) == 1


@pytest.mark.long  # the smallest loop records them each time
def test_the_microbatches_of_a_loop_are_recorded_as_those_of_a_task() -> None:
    by_loop = run(2, kills=[(1, 2, "apply")], steps=3, records_microbatches=True)
    task = train(1, microbatches=MICROBATCHES, steps=3, records_microbatches=True)
    assert by_loop.bits == task.bits
    assert {len(numbers["microbatches"]) for numbers in task.numbers} == {MICROBATCHES}


class Witness(Loop):
    """Writes down each step that was entered and each that was left, with the average of the losses."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def entered(self, session: Session, step: UserStep) -> None:
        self._note("entered", session, step)

    def applied(self, session: Session, step: UserStep, average: Average) -> None:
        with (self._folder / f"average {step.number}").open("a") as file:
            file.write(f"{average.count} {average.value!r}\n")

    def left(self, session: Session, step: UserStep, *_: object) -> None:
        self._note("left", session, step)

    def _note(self, what: str, session: Session, step: UserStep) -> None:
        with (self._folder / f"from {session.first_step}").open("a") as file:
            file.write(f"{what} {step.number}\n")


class Late(Witness):
    """In a worker that joins later it does not come to `shard` before a file is there, and it has slept."""

    def __init__(self, notes: Path, folder: Path, *, sleeps_s: float = 0.0) -> None:
        super().__init__(notes)
        self._processes, self._goes_on, self._sleeps_s = folder / "built", folder / "goes on", sleeps_s

    def built(self, model: nn.Module) -> None:
        with self._processes.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if len(self._processes.read_text().split()) > 2:
            time.sleep(self._sleeps_s)
            eventually(self._goes_on.exists)


def late_in(folder: Path, **others: Any) -> Late:
    notes = folder / "notes"
    notes.mkdir()
    return Late(notes, folder, **others)


def test_a_joiner_that_is_slow_to_come_to_shard_stops_nobody_and_has_the_registered_state(tmp_path: Path) -> None:
    """The function of the other worker, its frame, continues. A rewind goes back with the registered state."""
    notes = tmp_path / "notes"
    job = replace(a_job(tmp_path), task=TrainFunction(late_in(tmp_path)))

    def act(driver: Driver, seen: Seen) -> None:
        os.kill(driver.state.facts[driver.state.members[1]].pid, signal.SIGKILL)
        seen.wait(lambda s: s.of("worker_lost"))
        eventually(lambda: len((tmp_path / "built").read_text().split()) == 3)
        goal = seen.step + 2
        seen.wait(lambda s: s.step >= goal)
        assert seen.memberships[-1] == {0}
        (tmp_path / "goes on").touch()
        seen.wait(lambda s: s.memberships[-1] == {0, 2})
        joined = seen.step
        seen.wait(lambda s: s.step > joined)
        step, *_ = driver.checkpoint().result(60)
        seen.wait(lambda s: s.step > step)
        driver.rewind(step)
        seen.wait(lambda s: s.of("rewind"))
        before = len(seen.of("step"))
        seen.wait(lambda s: len(s.of("step")) > before + 1)

    drive(job, make_limits(job, 2, min_workers=1, max_worker_losses=1), act)
    (joined,) = [file for file in notes.glob("from *") if file.name != "from 1"]
    first = int(joined.name.split()[1])
    assert joined.read_text().splitlines()[:2] == [f"entered {first}", f"left {first}"]
    survivor = (notes / "from 1").read_text().splitlines()
    assert f"left {first}" in survivor  # of the same call of the function
    for file in notes.glob("average *"):
        lines = file.read_text().splitlines()
        assert {line.split()[0] for line in lines} == {file.name.split()[1]}
        assert len(set(lines)) == 1


@pytest.mark.long  # the function of a joiner takes 30 s
def test_a_joiner_whose_function_takes_30_s_to_come_to_shard_lengthens_no_step(tmp_path: Path) -> None:
    """The data let a step of one worker take about a second. One that waits would take half a minute."""
    job = replace(a_job(tmp_path), task=TrainFunction(late_in(tmp_path, sleeps_s=30.0)))
    (tmp_path / "goes on").touch()

    def act(driver: Driver, seen: Seen) -> None:
        os.kill(driver.state.facts[driver.state.members[1]].pid, signal.SIGKILL)
        eventually(lambda: len((tmp_path / "built").read_text().split()) == 3)
        first = seen.step
        seen.wait(lambda s: s.memberships[-1] == {0, 2})
        meanwhile = [sum(fields["seconds"].values()) for fields in seen.of("step") if fields["step"] > first]
        assert len(meanwhile) >= 15
        assert max(meanwhile) < 10

    drive(job, make_limits(job, 2, min_workers=1, max_worker_losses=1), act)


@pytest.mark.long  # frames that outlive a double loss, and a resume by another driver, are tried each time
def test_a_double_loss_continues_from_the_checkpoint_with_its_registered_state(tmp_path: Path) -> None:
    kills = [(0, 4, "backward"), (1, 4, "backward")]
    outcome = run(2, Witness(tmp_path), kills=kills, save_every=1, steps=4)
    assert "checkpoint" in {fields["source"] for fields in outcome.of("generation")}
    assert outcome.bits == by_task(4).bits
    assert len(set((tmp_path / "average 4").read_text().splitlines())) == 1


class Numbers(Witness):
    """Writes down the number of each step that a process enters."""

    def entered(self, session: Session, step: UserStep) -> None:
        with (self._folder / f"entered by {os.getpid()}").open("a") as file:
            file.write(f"{step.number}\n")


def test_frames_that_outlive_a_double_loss_continue_behind_the_checkpoint(tmp_path: Path) -> None:
    kills = [(1, 5, "backward"), (2, 5, "backward")]  # a worker, and the one that has its mirror
    outcome = run(3, Numbers(tmp_path), kills=kills, save_every=2)
    back = outcome.of("generation")[1]
    assert back["source"] == "checkpoint"
    assert back["step"] in (2, 4)
    entered = [[int(number) for number in file.read_text().split()] for file in tmp_path.glob("entered by *")]
    continued = [numbers for numbers in entered if numbers[0] == 1 and numbers[-1] == STEPS]
    assert continued == [[*range(1, 6), *range(back["step"] + 1, STEPS + 1)]]
    assert outcome.bits == by_task().bits
    for number in range(1, STEPS + 1):
        assert len(set((tmp_path / f"average {number}").read_text().splitlines())) == 1


@pytest.mark.long  # tests/adapters/test_accelerate.py has such a loss each time
def test_a_loss_of_all_state_before_the_first_checkpoint_begins_again_at_the_first_step(tmp_path: Path) -> None:
    engine = rs.EngineConfig(mirrors=False)
    outcome = run(2, Witness(tmp_path), kills=[(1, 2, "backward")], engine=engine, steps=3)
    assert [fields["source"] for fields in outcome.of("generation")][1] == "start"
    assert outcome.bits == by_task(3).bits


@pytest.mark.long  # one with registered tensors is resumed by another number of workers each time
def test_a_loop_is_resumed_by_another_driver_with_another_number_of_workers(tmp_path: Path) -> None:
    job = small_job(f"{tmp_path}/run", task=TrainFunction(Loop()), steps=1)
    make_driver(job, make_limits(job, 1), Listening()).run()
    state, _ = resume(job.run_url, 2, steps=3, task=TrainFunction(Loop()))
    assert fingerprint(state) == by_task(3).fingerprint


@pytest.mark.long  # the slow joiner's run is rewound each time
def test_a_rewind_goes_back_with_the_registered_state(tmp_path: Path) -> None:
    job = replace(a_job(tmp_path), task=TrainFunction(Loop()))

    def act(driver: Driver, seen: Seen) -> None:
        step, *_ = driver.checkpoint().result(60)
        seen.wait(lambda s: s.step > step)
        driver.rewind(step)
        seen.wait(lambda s: s.of("rewind"))
        before = len(seen.of("step"))
        seen.wait(lambda s: len(s.of("step")) > before + 2)

    drive(job, make_limits(job, 2), act)


@pytest.mark.long  # a factor for some steps is tried each time
def test_a_factor_of_the_learning_rate_has_the_bits_that_a_task_has_with_it(tmp_path: Path) -> None:
    found = []
    for name, task in {"loop": TrainFunction(Loop()), "task": GptTask()}.items():
        job = small_job(f"{tmp_path}/{name}", task=task, steps=STEPS)
        listener = Listening(lambda kind, _: kind == "started")
        driver = make_driver(job, make_limits(job, 2 if name == "loop" else 1), listener)
        listener.do = partial(driver.set_learning_rate, 0.5)
        state = driver.run()
        rates = {fields["step"]: fields["lr"] for fields in listener.of("step")}
        found.append((fingerprint(state), rates))
    assert found[0] == found[1]
    assert found[0][0] != by_task().fingerprint


class Unscheduled:
    """A loop without a schedule. It writes down the rates of its groups behind each step."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes

    def __call__(self, session: Session) -> None:
        model = session.build(Small)
        optimizer = optimizer_of(model)
        session.shard(model, optimizer)
        for step in session.steps():
            with step:
                for batch in step.microbatches():
                    compute(step, model, batch)
                optimizer.step()
            with self._notes.open("a") as file:
                file.write(f"{[group['lr'] for group in optimizer.param_groups]}\n")


class Scaled(SmallTask):
    """Has the factors of another run as its schedule."""

    max_grad_norm = None

    def __init__(self, rates: dict[int, float]) -> None:
        self._rates = rates

    def lr_scale(self, step: int) -> float:
        return self._rates[step] / 0.01


class Halving(Listening):
    """Sets the factor 0.5 behind step 2, and 1 once a step had the other."""

    set: Callable[[float], None]
    restored = False

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        super().__call__(kind, fields)
        if kind == "step" and fields["step"] == 2:
            self.set(0.5)
        if kind == "step" and fields["lr"] == 0.005 and not self.restored:
            self.restored = True
            self.set(1.0)


def test_a_factor_that_is_set_for_some_steps_leaves_the_numbers_of_the_groups_alone(tmp_path: Path) -> None:
    notes, steps = tmp_path / "rates", 16
    job = small_job(f"{tmp_path}/loop", task=TrainFunction(Unscheduled(notes)), steps=steps)
    listener = Halving()
    driver = make_driver(job, make_limits(job, 2), listener)
    listener.set = driver.set_learning_rate
    state = driver.run()
    rates = {fields["step"]: fields["lr"] for fields in listener.of("step")}
    assert [rates[step] for step in (1, 2, steps)] == [0.01] * 3
    assert 0.005 in rates.values()
    assert set(notes.read_text().splitlines()) == {"[0.01, 0.003]"}
    of_task = train(1, task=Scaled(rates), microbatches=MICROBATCHES, steps=steps)
    assert of_task.fingerprint == fingerprint(state)
    assert [numbers["lr"] for numbers in of_task.numbers] == list(rates.values())


class Plain:
    """The smallest loop: no schedule, no clipping, nothing registered."""

    def __call__(self, session: Session) -> None:
        model = session.build(Gpt)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.shard(model, optimizer)
        for step in session.steps():
            with step:
                for batch in step.microbatches():
                    step.backward(plain_loss(model, batch))
                optimizer.step()


class PlainTask(rs.Task):
    def build_model(self) -> nn.Module:
        return Gpt()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return plain_loss(model, batch)


def plain_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def test_the_smallest_loop_has_the_bits_of_the_smallest_task() -> None:
    """Its microbatches are recorded as those of the task."""
    of_task = train(1, task=PlainTask(), microbatches=MICROBATCHES, steps=2, records_microbatches=True)
    assert {len(numbers["microbatches"]) for numbers in of_task.numbers} == {MICROBATCHES}
    assert run(2, Plain(), steps=2, kills=[(1, 2, "apply")], records_microbatches=True).bits == of_task.bits

"""A user's loop gives the bits of `fit()` with the same model, at every size and after every loss."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from raysharded.driver.driver import Driver
from raysharded.task import TrainFunction
from tests.cases import tried_each_time
from tests.session.loops import MICROBATCHES, STEPS, Average, Loop, by_task, run
from tests.training.harness import Gpt, make_driver, make_limits, train
from tests.training.test_checkpoints import Listening, fingerprint, resume, small_job
from tests.training.test_generations import eventually
from tests.training.test_leaving import Seen, a_job, drive

pytestmark = pytest.mark.procs


@pytest.mark.parametrize("workers", tried_each_time([1, 2, 3], [1, 2, 3, 5, 8]))
def test_a_loop_has_the_bits_of_a_task_at_every_number_of_workers(workers: int) -> None:
    assert run(workers).bits == by_task().bits


KILLS = {
    "form": [(2, 1, "form")],
    "transfer": [(1, 2, "agree"), (2, 1, "transfer")],  # after the loss before it
    **{phase: [(1, 3, phase)] for phase in ("data", "forward", "backward", "agree", "apply", "snapshot", "save")},
}


@pytest.mark.parametrize("phase", KILLS)
def test_a_worker_that_is_killed_in_any_phase_changes_no_bit(phase: str) -> None:
    assert run(3, kills=KILLS[phase], save_every=3).bits == by_task().bits


def test_the_microbatches_of_a_loop_are_recorded_as_those_of_a_task() -> None:
    by_loop = run(3, kills=[(1, 2, "apply")], records_microbatches=True)
    task = train(1, microbatches=MICROBATCHES, steps=STEPS, records_microbatches=True)
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


def test_the_frame_continues_and_a_worker_that_joins_has_the_registered_state(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    job = replace(a_job(tmp_path), task=TrainFunction(Witness(notes)))

    def act(driver: Driver, seen: Seen) -> None:
        os.kill(driver.state.facts[driver.state.members[1]].pid, signal.SIGKILL)
        seen.wait(lambda s: 2 in s.memberships[-1])
        joined = seen.step
        seen.wait(lambda s: s.step > joined + 1)

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


class Late(Loop):
    """In a worker that joins later it does not come to `shard` before a file is there."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def built(self, model: nn.Module) -> None:
        with (self._folder / "built").open("a") as file:
            file.write(f"{os.getpid()}\n")
        if len((self._folder / "built").read_text().split()) > 2:
            eventually((self._folder / "goes on").exists)


def test_a_joiner_whose_function_is_slow_to_come_to_shard_stops_nobody(tmp_path: Path) -> None:
    job = replace(a_job(tmp_path), task=TrainFunction(Late(tmp_path)))

    def act(driver: Driver, seen: Seen) -> None:
        os.kill(driver.state.facts[driver.state.members[1]].pid, signal.SIGKILL)
        seen.wait(lambda s: s.of("worker_lost"))
        eventually(lambda: len((tmp_path / "built").read_text().split()) == 3)
        goal = seen.step + 5
        seen.wait(lambda s: s.step >= goal)
        assert seen.memberships[-1] == {0}
        (tmp_path / "goes on").touch()
        seen.wait(lambda s: s.memberships[-1] == {0, 2})

    drive(job, make_limits(job, 2, min_workers=1, max_worker_losses=1), act)


def test_a_double_loss_continues_from_the_checkpoint_with_its_registered_state(tmp_path: Path) -> None:
    kills = [(0, 5, "backward"), (1, 5, "backward")]
    outcome = run(2, Witness(tmp_path), kills=kills, save_every=2)
    assert "checkpoint" in {fields["source"] for fields in outcome.of("generation")}
    assert outcome.bits == by_task().bits
    assert len(set((tmp_path / f"average {STEPS}").read_text().splitlines())) == 1


def test_a_loss_of_all_state_before_the_first_checkpoint_begins_again_at_the_first_step(tmp_path: Path) -> None:
    engine = rs.EngineConfig(mirrors=False)
    outcome = run(2, Witness(tmp_path), kills=[(1, 3, "backward")], engine=engine)
    assert [fields["source"] for fields in outcome.of("generation")][1] == "start"
    assert outcome.bits == by_task().bits


def test_a_loop_is_resumed_by_another_driver_with_another_number_of_workers(tmp_path: Path) -> None:
    job = small_job(f"{tmp_path}/run", task=TrainFunction(Loop()), steps=3)
    make_driver(job, make_limits(job, 2), Listening()).run()
    state, _ = resume(job.run_url, 3, steps=STEPS, task=TrainFunction(Loop()))
    assert fingerprint(state) == by_task().fingerprint


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


def test_a_factor_of_the_learning_rate_has_the_bits_that_a_task_has_with_it(tmp_path: Path) -> None:
    found = []
    for name, task in {"loop": TrainFunction(Loop()), "task": None}.items():
        job = small_job(f"{tmp_path}/{name}", task=task, steps=STEPS)
        listener = Listening(lambda kind, _: kind == "started")
        driver = make_driver(job, make_limits(job, 2), listener)
        listener.do = partial(driver.set_learning_rate, 0.5)
        state = driver.run()
        rates = {fields["step"]: fields["lr"] for fields in listener.of("step")}
        found.append((fingerprint(state), rates))
    assert found[0] == found[1]
    assert found[0][0] != by_task().fingerprint


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
    of_task = train(1, task=PlainTask(), microbatches=MICROBATCHES, steps=3)
    assert run(2, Plain(), steps=3, kills=[(1, 2, "agree")]).bits == of_task.bits

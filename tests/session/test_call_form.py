"""The call form, for loops that cannot be opened: a step ends when the next one is requested."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import raysharded as rs
from raysharded.actors.session.held_out import begin_step
from raysharded.actors.session.user_session import Session
from raysharded.errors import InexactError, TaskError
from raysharded.task import TrainFunction
from tests.cases import tried_each_time
from tests.session.loops import STEPS, Average, by_small_task, compute, optimizer_of, run, schedule
from tests.training.harness import Small, SmallTask, make_driver, make_limits
from tests.training.test_checkpoints import Listening, fingerprint, resume, small_job
from tests.training.test_generations import eventually

pytestmark = pytest.mark.procs


class Trainer:
    """A loop as a framework has it: it counts its steps, stops by itself, and knows no session in its body."""

    def __init__(
        self, notes: Path | None = None, mistake: str = "", steps: int = STEPS, *, waits: bool = False
    ) -> None:
        """`waits`: behind the gradient of step 3 all but one wait for that one's loss."""
        self._notes, self._mistake, self._steps, self._waits = notes, mistake, steps, waits

    def __call__(self, session: Session) -> None:
        model = session.build(Small)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        average = Average()
        session.shard(model, optimizer, scheduler=scheduler, average=average)
        task = SmallTask()

        def loss_of(batch: torch.Tensor) -> rs.Loss | torch.Tensor:
            return task.loss(model, batch)

        while average.count < self._steps:
            if self._mistake == "counts first":
                average.count += 1
            step = session.gradient(loss_of)
            if self._waits and step.number == 3 and session.rank != 1:
                eventually(lambda: session._training.engine.is_aborted)  # type: ignore[union-attr]
                self._waits = False
            step.clip_grad_norm_(0.7)
            if self._mistake != "no step":
                optimizer.step()
            scheduler.step()
            average.add(step.loss)
            if self._notes is not None:
                with (self._notes / f"step {step.number}").open("a") as file:
                    file.write(f"{average.count} {average.value!r}\n")


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.long  # as does one that loses workers
def test_a_loop_that_stops_by_itself_commits_its_last_step_and_has_the_bits_of_a_task(workers: int) -> None:
    assert run(workers, Trainer()).bits == by_small_task().bits


KILLS = [(1, 2, "forward"), (2, 3, "agree"), (3, 4, "apply"), (4, 5, "snapshot")]
TWO = (3, [(1, 2, "forward"), (2, 3, "apply")])


@pytest.mark.parametrize(
    ("workers", "kills"), tried_each_time([TWO], [TWO, (5, KILLS), *((3, [(1, 3, phase)]) for *_, phase in KILLS)])
)
def test_a_loss_is_not_seen_by_the_loop_and_changes_no_bit(
    tmp_path: Path, workers: int, kills: list[tuple[int, int, str]]
) -> None:
    steps = 1 + max(step for _, step, _ in kills)
    assert run(workers, Trainer(tmp_path, steps=steps), kills=kills, steps=steps).bits == by_small_task(steps).bits
    for number in range(1, steps + 1):
        lines = (tmp_path / f"step {number}").read_text().splitlines()
        assert len(set(lines)) == 1
        assert lines[0].split()[0] == str(number)


def test_a_loss_that_comes_behind_the_call_raises_nothing_until_the_next_one() -> None:
    found = run(2, Trainer(steps=4, waits=True), kills=[(1, 3, "apply")], steps=4)
    assert found.bits == by_small_task(4).bits


@pytest.mark.long  # a worker that joins begins there, too, each time
def test_the_call_form_is_resumed_with_its_registered_state(tmp_path: Path) -> None:
    job = small_job(f"{tmp_path}/run", task=TrainFunction(Trainer(steps=2)), steps=2)
    make_driver(job, make_limits(job, 2), Listening()).run()
    state, _ = resume(job.run_url, 1, steps=4, task=TrainFunction(Trainer(steps=4)))
    assert fingerprint(state) == by_small_task(4).fingerprint


@pytest.mark.parametrize(
    ("mistake", "error", "sentence"),
    [
        ("counts first", InexactError, r"changed between step 0 and the next: average\.count = 1 \(it was 0\)"),
        pytest.param(
            *("no step", TaskError, r"step 1 ended without optimizer\.step\(\)"),
            marks=pytest.mark.long,  # `test_misuse.py` has it
        ),
    ],
)
def test_a_mistake_in_the_call_form_ends_with_a_sentence(mistake: str, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        run(1, Trainer(mistake=mistake))


@pytest.mark.long  # `test_misuse.py` has a loop that returns
def test_a_loop_that_stops_too_early_ends_with_a_sentence() -> None:
    with pytest.raises(TaskError, match="returned before the run's last step"):
        run(1, Trainer(steps=2))


class StepByStep:
    """A loop over an adapter's microbatches, in which no `with` ends a step: an error goes through the function."""

    def __init__(self, mistake: str = "", steps: int = STEPS) -> None:
        self._mistake, self._steps = mistake, steps
        self.kept: list[object] = []
        """The steps' iterators, which an adapter still holds behind an error."""

    def __call__(self, session: Session) -> None:
        model = session.build(Small)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        average = Average()
        session.shard(model, optimizer, scheduler=scheduler, average=average)
        while average.count < self._steps:
            step = begin_step(session)
            batches = step.microbatches()
            self.kept.append(batches)
            for batch in batches:
                if self._mistake and step.number == 3:
                    raise KeyError(self._mistake)
                compute(step, model, batch)
            step.stays_open = True
            step.clip_grad_norm_(0.7)
            optimizer.step()
            scheduler.step()
            average.add(step.loss)


def test_a_loss_in_a_step_that_no_with_ends_calls_the_function_again() -> None:
    """The next generation used to wait for ever: the step's iterator held the lock of the task's code."""
    outcome = run(2, StepByStep(steps=3), kills=[(1, 2, "backward")], steps=3)
    assert outcome.fingerprint == by_small_task(3).fingerprint
    assert len(outcome.of("recovery")) == 1


def test_an_error_in_a_step_that_no_with_ends_is_the_runs() -> None:
    with pytest.raises(TaskError, match=r"KeyError: 'no such column'") as raised:
        run(1, StepByStep("no such column"), retries=1)
    assert "behind the step" not in str(raised.value)

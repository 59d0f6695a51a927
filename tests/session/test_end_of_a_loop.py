"""The end of a user's loop: a loss behind its last step, a run that the loop ends early, values of the whole model."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysharded.actors.session.held_out import outputs_of, weights_of
from raysharded.actors.session.step_comparisons import Attempts
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from raysharded.errors import TaskError
from raysharded.ids import WorkerId
from raysharded.overrides import Decisions
from raysharded.task import TrainFunction
from raysharded.testing import Fault, FaultPlan
from tests.cases import tried_each_time
from tests.session.loops import MICROBATCHES, STEPS, Average, Loop, by_small_task, optimizer_of, run, schedule
from tests.training.harness import Small, SmallTask, log_into, make_driver, make_limits, samples, train
from tests.training.test_checkpoints import Listening, fingerprint, resume, small_job

pytestmark = pytest.mark.procs

DATA = samples()[:5]


class Calls:
    """A loop as a framework has it, with an evaluation behind its end, which notes how often it was called."""

    def __init__(self, folder: Path, evaluates: bool = True) -> None:
        self._folder, self._evaluates = folder, evaluates

    def __call__(self, session: Session) -> None:
        task, average = SmallTask(), Average()
        model = session.build(Small)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        session.shard(model, optimizer, scheduler=scheduler, average=average)
        with (self._folder / f"{session.rank}").open("a") as file:
            file.write(f"from {session.first_step}\n")
        while average.count < session.max_steps:
            step = session.gradient(lambda batch: task.loss(model, batch))
            step.clip_grad_norm_(0.7)
            optimizer.step()
            scheduler.step()
            average.add(step.loss)
        if self._evaluates:
            session.evaluate(lambda batch: task.loss(model, batch), DATA)


def numbers(outcome: Any) -> Any:
    return [{k: v for k, v in one.items() if k != "evaluation"} for one in outcome.numbers], outcome.fingerprint


@pytest.mark.parametrize(
    ("phase", "evaluates"), tried_each_time([("apply", True)], [("apply", True), ("snapshot", False)])
)
def test_a_loss_behind_the_last_gradient_calls_the_function_again_from_that_step(
    tmp_path: Path, phase: str, evaluates: bool
) -> None:
    found = run(2, Calls(tmp_path, evaluates), kills=[(1, 3, phase)], steps=3)
    assert numbers(found) == numbers(by_small_task(3))
    calls = (tmp_path / "0").read_text().split("from ")
    assert [int(one) for one in calls[1:]] == [1, 3]


class Stopping(Loop):
    def __init__(self, at: int) -> None:
        super().__init__(Small)
        self._at = at

    def applied(self, session: Session, step: UserStep, average: Average) -> None:
        if step.number == self._at:
            session.stop()


@pytest.mark.long  # one whose run has lost a worker is tried each time, and continued
@pytest.mark.parametrize("kills", [[], [(1, 3, "snapshot")]])
def test_a_loop_that_stops_the_run_has_the_bits_of_a_shorter_one(kills: list[Any]) -> None:
    found = train(2, task=TrainFunction(Stopping(3)), microbatches=MICROBATCHES, steps=STEPS, done=3, kills=kills)
    assert found.bits == by_small_task(3).bits


def test_a_run_that_was_stopped_by_its_loop_has_a_checkpoint_and_is_found_done(tmp_path: Path) -> None:
    """Its last step is complete although a worker was lost behind it."""
    kill = Fault(worker=WorkerId(1), step=3, phase="snapshot")
    faults = FaultPlan(faults=(kill,), folder=str(tmp_path))
    job = small_job(f"{tmp_path}/run", task=TrainFunction(Stopping(3)), steps=STEPS, faults=faults)
    first = Listening()
    make_driver(job, make_limits(job, 2, min_workers=1, max_worker_losses=1, join_wait_s=60.0), first).run()
    assert faults.fired(kill)
    assert sorted(first.numbers) == [1, 2, 3]
    assert repr(tuple(first.numbers[step] for step in (1, 2, 3))) == by_small_task(3).bits[0]
    state, listener = resume(job.run_url, 1, steps=STEPS, task=TrainFunction(Stopping(3)))
    assert fingerprint(state) == by_small_task(3).fingerprint
    assert not listener.of("step")


class Looking(Loop):
    """A loop that inspects the whole model behind each step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Small)
        self._folder = folder

    def built(self, model: Any) -> None:
        self._model = model

    def applied(self, session: Session, step: UserStep, average: Average) -> None:
        def compute(batch: Any) -> Any:
            assert not torch.is_grad_enabled()
            assert not self._model.training
            logits = self._model(batch[:, :-1])
            return {"logits": logits, "nothing": None, "sizes": [torch.tensor(len(batch))]}

        found = outputs_of(session, DATA, 2, compute)
        assert [one["sizes"][0].item() for one in found] == [2, 2, 1]
        assert found[0]["nothing"] is None
        weights = weights_of(step)
        assert (weights is None) == (session.rank != 0)
        if weights is not None:
            whole = Small()
            whole.load_state_dict(weights | {"head.weight": weights["embedding.weight"]})
            with torch.no_grad():
                for place, one in enumerate(found):
                    batch = torch.stack([torch.from_numpy(sample) for sample in DATA[2 * place : 2 * place + 2]])
                    assert torch.allclose(whole.eval()(batch[:, :-1]), one["logits"], atol=1e-6)
        digest = torch.cat([one["logits"].flatten() for one in found]).double().sum().item()
        with (self._folder / f"{step.number}").open("a") as file:
            file.write(f"{digest!r}\n")


@pytest.mark.parametrize("workers", tried_each_time([2], [1, 2, 3]))
def test_outputs_and_weights_are_whole_and_the_same_on_every_worker(tmp_path: Path, workers: int) -> None:
    assert run(workers, Looking(tmp_path), steps=3).bits == by_small_task(3).bits
    for number in (1, 2, 3):
        lines = (tmp_path / f"{number}").read_text().splitlines()
        assert len(lines) == workers
        assert len(set(lines)) == 1


class Early:
    def __call__(self, session: Session) -> None:
        session.stop()


@pytest.mark.long  # `test_misuse.py` has it
def test_a_stop_outside_a_step_is_refused() -> None:
    with pytest.raises(TaskError, match=r"session\.stop\(\) belongs into `with step:`"):
        run(1, Early())


class Ending(Loop):
    """Has lines behind its loop: it writes a file, then does what a test wants."""

    def __init__(self, folder: Path, kind: str = "") -> None:
        super().__init__(Small)
        self._folder, self._kind = folder, kind

    def __call__(self, session: Session) -> None:
        super().__call__(session)
        (self._folder / f"{session.rank}").touch()
        if self._kind == "raises":
            raise ValueError("no such account")
        if self._kind == "sleeps":
            time.sleep(60)


@pytest.mark.long  # lines that request a checkpoint are run each time
@pytest.mark.parametrize("kills", [[], [(1, 3, "snapshot")]])
def test_lines_behind_the_loop_run_once_the_run_is_over(tmp_path: Path, kills: list[Any]) -> None:
    assert run(2, Ending(tmp_path), kills=kills, steps=3).bits == by_small_task(3).bits
    assert sorted(file.name for file in tmp_path.iterdir()) == (["0"] if kills else ["0", "1"])


class Saving(Ending):
    """Requests a checkpoint behind its last step, and behind its loop."""

    def __call__(self, session: Session) -> None:
        super().__call__(session)
        session.save()
        (self._folder / f"end {session.rank}").touch()

    def left(self, session: Session, step: UserStep, *_: object) -> None:
        if step.number == session.max_steps and step.done:
            session.save()
            (self._folder / f"last {session.rank} of {session.step is not None}").touch()


def test_a_checkpoint_that_is_requested_behind_the_last_step_ends_no_line(tmp_path: Path) -> None:
    found = run(2, Saving(tmp_path), steps=3)
    assert found.bits == by_small_task(3).bits
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"last 0 of True", "last 1 of True", "0", "1", "end 0", "end 1"}
    assert [fields["step"] for fields in found.of("checkpoint")] == [3]


class OverTraining:
    """A training that a boundary has ended, which has no engine."""

    is_over = True


class Requested:
    """An engine at a step, which counts requests."""

    def __init__(self, step: int) -> None:
        self.step, self.requests, self.decisions = step, 0, Decisions()
        self.steps = SimpleNamespace(parts=SimpleNamespace(sharded=SimpleNamespace(model=torch.nn.Linear(1, 1))))

    def request_save(self) -> None:
        self.requests += 1


@pytest.mark.parametrize(("begins_at", "requests"), [(5, 1), (4, 0)], ids=["at a boundary", "done again"])
def test_a_checkpoint_that_is_requested_as_the_workers_change_is_one_of_the_next_step(
    begins_at: int, requests: int
) -> None:
    attempts, engine = Attempts(), Requested(begins_at)
    attempts.request_save(OverTraining(), 5)  # type: ignore[arg-type]  # all that it reads
    attempts.begin(engine)  # type: ignore[arg-type]
    assert engine.requests == requests


class TooSoon:
    def __call__(self, session: Session) -> None:
        session.save()


def test_a_checkpoint_that_is_requested_ahead_of_shard_is_refused() -> None:
    with pytest.raises(TaskError, match=r"session\.save\(\) comes after session\.shard"):
        run(1, TooSoon())


@pytest.mark.parametrize(("kind", "function_s"), [("raises", 20.0), ("sleeps", 1.0)])
def test_nothing_behind_the_loop_changes_the_runs_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, function_s: float
) -> None:
    job = small_job(f"{tmp_path}/run", task=TrainFunction(Ending(tmp_path, kind)), steps=3)
    log = tmp_path / "log"
    driver = make_driver(
        job, make_limits(job, 1), Listening(), prepare={WorkerId(0): partial(log_into, str(log))}, function_s=function_s
    )
    assert fingerprint(driver.run()) == by_small_task(3).fingerprint
    assert (tmp_path / "0").exists()
    if kind == "raises":
        assert "raised behind the run's last step, which is done" in log.read_text()
        assert "ValueError: no such account" in log.read_text()
    else:
        assert "training function of 1 worker (0) has not returned 1 s after the run's last step" in caplog.text

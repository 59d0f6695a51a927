"""A session inside a step: generators, logged numbers, requested checkpoints, and the checks that a task's step has."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from raysharded.errors import InexactError, NonFiniteLoss, TaskError
from raysharded.ids import WorkerId
from raysharded.testing import Fault, FaultPlan, processes
from tests.cases import tried_each_time
from tests.session.loops import MICROBATCHES, Loop, by_small_task, optimizer_of, run
from tests.training.harness import Collector, Outcome, Small, SmallTask, Tokens, samples, train

pytestmark = pytest.mark.procs
STEPS = 4


class Drawing:
    """Drops tokens, and adds noise to the loss, by generators of the session's."""

    def __call__(self, session: Session) -> None:
        model = session.build(Small)
        optimizer = optimizer_of(model)
        session.shard(model, optimizer)
        keeps, noise = session.generator("keeps"), session.generator("noise")
        for step in session.steps():
            first = torch.rand((), generator=noise).item()
            with step:
                for batch in step.microbatches():
                    kept = torch.rand(batch[:, 1:].shape, generator=keeps) < 0.7
                    each = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
                    step.backward((each * kept.flatten()).sum(), weight=int(kept.sum()))
                optimizer.step()
                session.log(first=first, noise=torch.rand((), generator=noise).item())


@pytest.fixture(scope="module")
def drawn_alone() -> Outcome:
    return run(1, Drawing(), steps=STEPS)


TWO = [(1, 2, "backward"), (2, 3, "snapshot")]


@pytest.mark.parametrize("kills", tried_each_time([TWO[:1]], [TWO, [], TWO[:1], TWO[1:]]))
def test_generators_draw_the_same_at_every_size_and_again_in_a_step_that_is_done_again(
    kills: list[tuple[int, int, str]], drawn_alone: Outcome
) -> None:
    assert run(2 if len(kills) == 1 else 3, Drawing(), kills=kills, steps=STEPS).bits == drawn_alone.bits


def test_generators_have_other_numbers_in_every_step_and_place(drawn_alone: Outcome) -> None:
    drawn = [numbers["metrics"][name] for numbers in drawn_alone.numbers for name in ("first", "noise")]
    assert len(set(drawn)) == 2 * STEPS
    assert all(0 <= number < 1 for number in drawn)


class Logging(Loop):
    def __init__(self, act: Callable[[Session, UserStep], Any]) -> None:
        super().__init__(Small)
        self._act = act

    def entered(self, session: Session, step: UserStep) -> None:
        if getattr(self._act, "enters", False):
            self._act(session, step)

    def applied(self, session: Session, step: UserStep, *_: object) -> None:
        if not getattr(self._act, "enters", False):
            self._act(session, step)


class LoggingAndSaving(Loop):
    """Logs two numbers in each step, and requests a checkpoint behind the update of step 2 and as step 5 begins."""

    def __init__(self) -> None:
        super().__init__(Small)

    def entered(self, session: Session, step: UserStep) -> None:
        if step.number == 5:
            session.save()

    def applied(self, session: Session, step: UserStep, *_: object) -> None:
        session.log(double=2 * step.number, loss_again=step.loss)
        if step.number == 2:
            session.save()


def test_a_logged_number_is_in_the_journal_once_for_each_step() -> None:
    """A checkpoint that the loop requests is of the step that begins, or of the next. That one is done again here."""
    outcome = run(2, LoggingAndSaving(), kills=[(1, 3, "backward")], steps=6)
    logged = [numbers["metrics"] for numbers in outcome.numbers]
    for numbers, metrics in zip(outcome.numbers, logged, strict=True):
        assert metrics.pop("double") == 2 * numbers["step"]
        assert metrics.pop("loss_again") == numbers["loss"]
    assert [fields["step"] for fields in outcome.of("checkpoint")] == [3, 5, 6]
    assert outcome.bits == by_small_task(6).bits


def logs_its_rank(session: Session, step: UserStep) -> None:
    session.log(rank=session.rank)


def logs_a_metric(session: Session, step: UserStep) -> None:
    session.log(accuracy=1.0)


def logs_text(session: Session, step: UserStep) -> None:
    session.log(name="text")  # type: ignore[arg-type]


def logs_early(session: Session, step: UserStep) -> None:
    session.log(early=1.0)


logs_early.enters = True  # type: ignore[attr-defined]


NOT_LOGGED = [
    (logs_its_rank, 2, InexactError, r"worker 0 has log\.rank = 0\.0, worker 1 log\.rank = 1\.0"),
    (logs_a_metric, 1, TaskError, r"session\.log\(accuracy=\.\.\.\): the step has a metric of this name"),
    (logs_text, 1, TaskError, r"was given a str; give a number"),
    (logs_early, 1, TaskError, r"step\.metrics is known once all workers have computed"),
]
"""`test_misuse.py` has all but the first in one run."""


@pytest.mark.parametrize(("act", "workers", "error", "sentence"), tried_each_time(NOT_LOGGED[:1], NOT_LOGGED))
def test_what_cannot_be_logged_is_refused(
    act: Callable[..., Any], workers: int, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        run(workers, Logging(act), steps=STEPS)


# -- evaluation --

HELD_OUT = samples()[:11]


class Evaluating(Loop):
    """Evaluates after every second step, as the trainer of a task does."""

    def __init__(self) -> None:
        super().__init__(Small)

    def applied(self, session: Session, step: UserStep, *_: object) -> None:
        if step.number % 2 == 0:
            found = session.evaluate(self.loss, HELD_OUT)
            assert found["loss"] > 0

    def built(self, model: nn.Module) -> None:
        self._model = model

    def loss(self, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        return SmallTask().loss(self._model, batch)


@cache
def evaluated_by_task() -> Outcome:
    evaluation = rs.EvalConfig(data=HELD_OUT, every_steps=2, num_samples=len(HELD_OUT))
    return train(1, task=SmallTask(), microbatches=MICROBATCHES, steps=STEPS, evaluation=evaluation)


BOTH = (3, [(1, 2, "snapshot"), (2, 4, "agree")])


@pytest.mark.long  # the run whose ledger is compared has them each time
@pytest.mark.parametrize(("workers", "kills"), [BOTH, (1, []), (3, [(1, 2, "agree")]), (2, [(1, 2, "snapshot")])])
def test_an_evaluation_in_the_loop_has_the_bits_of_a_tasks(workers: int, kills: list[tuple[int, int, str]]) -> None:
    assert all("evaluation" in numbers for numbers in evaluated_by_task().numbers[1::2])
    assert run(workers, Evaluating(), kills=kills, steps=STEPS).bits == evaluated_by_task().bits


def test_the_ledger_of_a_loop_that_evaluates_and_loses_a_worker_agrees(tmp_path: Path) -> None:
    """The worker hangs: the other one waits for it in the middle of the loop's step."""
    hang = Fault(worker=WorkerId(1), step=2, phase="backward", kind="stop")
    plan = FaultPlan(faults=(hang,), folder=str(tmp_path))
    trainer = rs.ElasticTrainer(
        train_fn=Evaluating(),
        data=samples(),
        batch=rs.BatchConfig(global_batch_size=2 * MICROBATCHES, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=(1, 2)),
        run=rs.RunConfig(
            name="it",
            storage_path=str(tmp_path / "runs"),
            max_steps=STEPS,
            failure=rs.FailureConfig(hang_timeout_s=3.0),
        ),
    )
    trainer.faults = plan
    journal = Collector()
    result = processes.fit(trainer, journal)
    assert plan.fired(plan.faults[0])
    numbers = tuple(journal.numbers[step] for step in range(1, STEPS + 1))
    assert (repr(numbers), result.fingerprint) == evaluated_by_task().bits
    report = result.report()
    assert report.ok, report.as_dict()
    assert report.ledger is not None
    assert report.ledger.steps_checked == STEPS
    assert (report.ledger.samples_lost, report.ledger.samples_repeated) == (0, 0)


class Noting:
    """A function that makes batches, and leaves the id of the process that calls it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        with (self._folder / str(os.getpid())).open("a") as file:
            file.write(".")
        batch: torch.Tensor = torch.utils.data.default_collate(samples)
        return batch.roll(int(torch.randint(3, ())), dims=1)


class Collating(Evaluating):
    """Makes its batches by `Noting`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __call__(self, session: Session) -> None:
        (self._folder / "worker").write_text(str(os.getpid()))
        shard, collate = session.shard, Noting(self._folder)
        session.shard = lambda *args, **others: shard(*args, **others, collate=collate)  # type: ignore[method-assign]
        super().__call__(session)


def test_a_loops_collate_is_called_where_samples_are_read_with_the_same_bits(tmp_path: Path) -> None:
    found = {}
    for prefetch in (True, False):
        folder = tmp_path / str(prefetch)
        folder.mkdir()
        engine = rs.EngineConfig(prefetch=prefetch)
        found[prefetch] = run(1, Collating(folder), data=Tokens(), engine=engine, steps=2).bits
        worker = (folder / "worker").read_text()
        elsewhere = [len(file.read_text()) for file in folder.iterdir() if file.name not in ("worker", worker)]
        assert sum(elsewhere) >= prefetch * MICROBATCHES
        assert bool(elsewhere) == prefetch
    assert found[True] == found[False]


class Curriculum:
    """Registered state, how far tokens are moved, and a function that makes batches by it."""

    by = 0

    def state_dict(self) -> dict[str, int]:
        return {"by": self.by}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.by = state["by"]

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        batch: torch.Tensor = torch.utils.data.default_collate(samples)
        return batch.roll(self.by, dims=1)


class Advancing(Loop):
    """Makes its batches by a function that depends on registered state, which changes behind step 2."""

    def __call__(self, session: Session) -> None:
        self.curriculum = made = Curriculum()
        shard = session.shard
        session.shard = lambda *args, **others: shard(*args, **others, collate=made, curriculum=made)  # type: ignore[method-assign]
        super().__call__(session)

    def applied(self, session: Session, step: UserStep, *_: object) -> None:
        self.curriculum.by = step.number // 2


def test_a_loops_collate_that_depends_on_changing_state_is_refused_where_batches_are_made_ahead() -> None:
    with pytest.raises(InexactError, match=r"session\.shard\(collate=\.\.\.\) makes another batch in step 4"):
        run(1, Advancing(Small), data=Tokens(), steps=STEPS)


def test_without_prefetch_a_loops_collate_may_depend_on_registered_state() -> None:
    engine = rs.EngineConfig(prefetch=False)
    alone = run(1, Advancing(Small), engine=engine, steps=3)
    kills = [(1, 3, "backward")]
    assert run(2, Advancing(Small), engine=engine, kills=kills, steps=3).bits == alone.bits


class Rarely(Evaluating):
    """Only one worker evaluates."""

    def applied(self, session: Session, step: UserStep, *_: object) -> None:
        if session.rank == 1:
            session.evaluate(self.loss, HELD_OUT)


class Nothing(Evaluating):
    def applied(self, session: Session, *_: object) -> None:
        session.evaluate(self.loss, HELD_OUT, num_samples=0)


class Early(Evaluating):
    def computed(self, session: Session, *_: object) -> None:
        session.evaluate(self.loss, HELD_OUT)


class Outside(Evaluating):
    def left(self, session: Session, *_: object) -> None:
        session.evaluate(self.loss, HELD_OUT)


ELSEWHERE = [
    (Rarely(), 2, InexactError, r"step 1: 1 of 2 workers call session\.evaluate, and the others do not"),
    (Nothing(), 1, TaskError, r":\d+: session\.evaluate\(num_samples=0\): give 1 or more"),
    (Early(), 1, TaskError, r"session\.evaluate\(\) belongs into `with step:`, behind optimizer\.step"),
    (Outside(), 1, TaskError, r"session\.evaluate\(\) belongs into `with step:`"),
]
"""`test_misuse.py` has all but the first in one run."""


@pytest.mark.parametrize(("loop", "workers", "error", "sentence"), tried_each_time(ELSEWHERE[:1], ELSEWHERE))
def test_an_evaluation_at_another_place_is_refused(
    loop: Loop, workers: int, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        run(workers, loop, steps=STEPS)


# -- the checks of a task's step, which yield more microbatches to the same body --


@pytest.mark.long  # the proof of a first step has a body compute more microbatches each time; audits, those of tasks
def test_an_audit_names_the_worker_that_computes_wrong_numbers_and_changes_no_bit() -> None:
    fault = Fault(worker=WorkerId(1), step=2, phase="backward", kind="corrupt")
    engine = rs.EngineConfig(audit_every_steps=1)
    outcome = run(3, Loop(Small), faults=[fault], engine=engine, steps=STEPS)
    assert outcome.of("corruption")[0]["culprits"] == [1]
    assert outcome.bits == by_small_task(STEPS).bits


def test_the_proof_of_a_first_step_names_the_worker_that_computes_wrong_numbers() -> None:
    fault = Fault(worker=WorkerId(1), step=1, phase="backward", kind="corrupt")
    with pytest.raises(InexactError, match=r"step 1: when microbatch 1 was computed a second time.*it is worker 1"):
        run(3, Loop(Small), faults=[fault], steps=STEPS)


class Diverging:
    """The gradient of one microbatch of step 2 is not finite."""

    def __call__(self, session: Session) -> None:
        model = session.build(Small)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        session.shard(model, optimizer, scheduler=scheduler)
        for step in session.steps():
            with step:
                for batch in step.microbatches():
                    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                    if step.number == 2 and step.microbatch == 1:
                        loss = loss + (loss * 0).sqrt()
                    step.backward(loss)
                optimizer.step()
                scheduler.step()


def test_a_number_that_is_not_finite_ends_the_run_with_its_microbatch() -> None:
    with pytest.raises(NonFiniteLoss, match=r"step 2: .*microbatch 1\)"):
        run(1, Diverging(), steps=STEPS)


def test_a_step_that_is_left_out_is_counted_by_the_schedule_and_changes_nothing() -> None:
    outcome = run(2, Diverging(), steps=3, on_non_finite="skip")
    assert [numbers.get("skipped", False) for numbers in outcome.numbers] == [False, True, False]
    assert [numbers["lr"] for numbers in outcome.numbers] == [0.01, 0.005, 0.0025]
    alone = run(1, Diverging(), steps=3, on_non_finite="skip")
    assert alone.bits == outcome.bits

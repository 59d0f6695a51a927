"""Modes that a loop sets between two steps, and of parts that `make()` leaves in eval mode: no change loses any."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raysharded.actors.model.modes import Modes
from raysharded.actors.optimizer.registered_state import RegisteredState
from raysharded.actors.session.loop_checks import keep_modes_behind
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from raysharded.actors.shards.restore import _from_lowest
from raysharded.actors.shards.store import ShardStore
from raysharded.ids import WorkerId
from raysharded.task import TrainFunction
from raysharded.testing import Fault
from tests.session.loops import Average, Loop, by_task, compute, optimizer_of, run
from tests.training.harness import A_CHANGE, Gpt, Outcome, make_driver, make_limits
from tests.training.test_checkpoints import Listening, fingerprint, resume, small_job

STEPS, JOIN_STEPS = 5, 8
_WAIT_S, _LOOK_UP_S = 60.0, 0.01


class Keeping(Loop):
    """Keeps its model."""

    def built(self, model: nn.Module) -> None:
        self._model = model


class Toggling(Keeping):
    """Changes a mode behind each step: one change that is lost gives the next steps other bits."""

    def left(self, session: Session, step: UserStep, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        block = self._model.get_submodule("blocks.0")
        block.train(not block.training)


@pytest.mark.procs
def test_modes_that_are_set_at_a_boundary_outlive_a_join() -> None:
    waits = Fault(worker=WorkerId(0), step=4, phase="data", kind="wait", until=A_CHANGE)
    found = run(2, Toggling(), steps=JOIN_STEPS, kills=[(1, 2, "forward")], faults=[waits])
    assert [len(fields["members"]) for fields in found.of("generation")] == [2, 1, 2]
    assert 4 <= found.of("generation")[-1]["step"] < JOIN_STEPS
    assert found.bits == run(1, Toggling(), steps=JOIN_STEPS).bits


def die_on_rank_1(session: Session) -> None:
    """Kill the worker of rank 1; return on others once they know."""
    if session.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + _WAIT_S
    while not session.is_interrupted:
        assert time.monotonic() < deadline
        time.sleep(_LOOK_UP_S)


class Evaluating(Keeping):
    """Puts a part in eval mode behind step 3; with `dies`, as the other worker has died behind it."""

    def __init__(self, *, dies: bool = False) -> None:
        super().__init__()
        self._dies = dies

    def left(self, session: Session, step: UserStep, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step.number != 3:
            return
        if self._dies and step.done:
            assert session._training is not None
            session._training.engine.commit_last()  # the step is held by both
            die_on_rank_1(session)
        self._model.get_submodule("blocks.0").eval()


@pytest.mark.procs
def test_a_mode_that_is_set_as_a_worker_dies_between_two_steps_stays() -> None:
    found = run(2, Evaluating(dies=True), losses=1, steps=STEPS)
    assert [(fields["step"], len(fields["members"])) for fields in found.of("generation")] == [(0, 2), (3, 1)]
    assert found.bits == run(1, Evaluating(), steps=STEPS).bits
    assert found.bits != by_task(STEPS).bits


class Ahead:
    """Has a line between `session.shard` and the first step, which a worker that joins runs, too; with `dies`, one of
    two has died ahead of it."""

    def __init__(self, *, dies: bool = False) -> None:
        self._dies = dies

    def __call__(self, session: Session) -> None:
        model, average = session.build(Gpt), Average()
        optimizer = optimizer_of(model)
        session.shard(model, optimizer, average=average)
        if self._dies and session.first_step == 1:
            die_on_rank_1(session)
        model.get_submodule("blocks.0").eval()
        for step in session.steps():
            with step:
                for batch in step.microbatches():
                    compute(step, model, batch)
                optimizer.step()
                average.add(step.loss)


@cache
def alone_ahead() -> Outcome:
    return run(1, Ahead(), steps=3)


@pytest.mark.procs
@pytest.mark.long  # a mode that is set between two steps, and one ahead of them without processes, are tried each time
@pytest.mark.parametrize("others", [{"kills": [(1, 1, "snapshot")]}, {"losses": 1}], ids=["in the step", "ahead"])
def test_a_mode_that_is_set_ahead_of_the_first_step_outlives_a_loss(others: dict[str, Any]) -> None:
    found = run(2, Ahead(dies="losses" in others), steps=3, **others)
    assert found.of("worker_lost")
    assert found.bits == alone_ahead().bits


class Unfreezing(Loop):
    """Its model has a frozen part with dropout, in eval mode, which the loop puts in train mode in step 2."""

    def __init__(self) -> None:
        super().__init__(frozen_gpt)

    def built(self, model: nn.Module) -> None:
        self._model = model

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)

    def entered(self, session: Session, step: UserStep) -> None:
        if step.number == 2:
            self._model.train()


def frozen_gpt() -> nn.Module:
    model = Gpt()
    model.get_submodule("blocks.0").requires_grad_(False).eval()
    return model


@pytest.mark.procs
@pytest.mark.long  # the state of such a part is restored without processes each time
def test_a_resumed_run_trains_a_part_that_the_loop_has_put_in_train_mode(tmp_path: Path) -> None:
    job = small_job(f"{tmp_path}/run", task=TrainFunction(Unfreezing()), steps=2)
    make_driver(job, make_limits(job, 1), Listening()).run()
    state, _ = resume(job.run_url, 1, steps=3, task=TrainFunction(Unfreezing()))
    assert fingerprint(state) == run(1, Unfreezing(), steps=3).fingerprint


# -- without processes --


def a_model() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Linear(2, 2))


def frozen_model() -> nn.Sequential:
    """With a part that keeps its eval mode."""
    model = a_model()
    model[0].requires_grad_(False).eval()
    return model


def state_of(model: nn.Module, number: int = 3) -> tuple[RegisteredState, Modes]:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    registered = RegisteredState(optimizer.param_groups, {})
    registered.modes = modes = Modes(model, number)
    modes.train()
    return registered, modes


class Behind:
    """A step, as the function has left it."""

    def __init__(self, number: int, *, done: bool) -> None:
        self.number, self.done = number, done


@pytest.mark.parametrize("done", [True, False])
def test_modes_are_kept_behind_a_step_that_counts_and_go_with_one_that_is_lost(done: bool) -> None:
    model, store = a_model(), ShardStore()
    registered, modes = state_of(model)
    modes.take_over()
    store.register(5, registered.text())
    for number in (5, 6):
        model[0].train(number == 6)
        keep_modes_behind(Behind(number, done=done), registered, store)  # type: ignore[arg-type]
    assert store.registered(6) is None
    assert json.loads(store.registered(5) or "")["modes"] == ["0"]
    assert store.is_behind(5) is done
    registered.load(store.registered(5) or "", step=5)
    assert [module.training for module in model] == [False, True]


class Meeting:
    """The host group of workers that are threads of this process."""

    def __init__(self, rank: int, given: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._given, self._barrier = rank, len(given), given, barrier

    def _all(self, own: Any) -> list[Any]:
        self._given[self.rank] = own
        self._barrier.wait(_WAIT_S)
        found = list(self._given)
        self._barrier.wait(_WAIT_S)
        return found

    def max_int(self, value: int) -> int:
        return int(max(self._all(value)))

    def sum_int64(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(values)).sum(0)


@pytest.mark.parametrize(
    ("texts", "behind", "wanted"),
    [
        (("a", "b", "c"), (False, False, False), "a"),
        (("a", "b", "c"), (False, True, True), "b"),
        ((None, "b", "c"), (True, False, False), "b"),
        ((None, None, None), (False, False, False), ""),
    ],
)
def test_state_comes_from_the_lowest_worker_whose_lines_behind_the_step_have_run(
    texts: tuple[str | None, ...], behind: tuple[bool, ...], wanted: str
) -> None:
    given: list[Any] = [None for _ in texts]
    barrier = threading.Barrier(len(texts))

    def meet(rank: int) -> str:
        return _from_lowest(texts[rank], Meeting(rank, given, barrier), is_behind=behind[rank])  # type: ignore[arg-type]

    with ThreadPoolExecutor(len(texts)) as pool:
        assert [*pool.map(meet, range(len(texts)))] == [wanted] * len(texts)


def trains_in(modes: dict[str, bool]) -> tuple[str, RegisteredState, Modes]:
    """A state of a model with a kept part, as of a step whose loop has set these modes."""
    model = frozen_model()
    registered, own = state_of(model)
    own.take_over()
    for name, mode in modes.items():
        model.get_submodule(name).train(mode)
    own.take_over()
    return registered.text(), registered, own


@pytest.mark.parametrize(("number", "trains"), [(3, True), (2, False)])
def test_all_modules_in_train_mode_come_back_as_such_in_a_process_whose_model_keeps_a_part(
    number: int, trains: bool
) -> None:
    """States of older versions lack the list of modes then; under older numbers the rule may have decided in them."""
    text, _, _ = trains_in({"": True})
    assert json.loads(text)["modes"] == []
    older = json.dumps({name: value for name, value in json.loads(text).items() if name != "modes"})
    for one, is_restored in ((text, True), (older, trains)):
        model = frozen_model()
        registered, modes = state_of(model, number)
        registered.load(one, step=5)
        assert model[0].training is is_restored
        modes.train()
        assert model[0].training is is_restored


def test_a_part_that_the_loop_leaves_in_eval_mode_comes_back_in_it() -> None:
    text, _, _ = trains_in({"1": False})
    model = frozen_model()
    registered, _ = state_of(model)
    registered.load(text, step=5)
    assert [module.training for module in model] == [False, False]
    assert model.training


@pytest.mark.parametrize("mode", [True, False])
def test_a_run_that_begins_again_has_the_modes_of_its_beginning(mode: bool) -> None:
    _, registered, modes = trains_in({"": mode})
    model = modes._model
    registered.load(registered.first, step=0)
    assert [module.training for module in model.children()] == [False, True]
    assert modes.changes == []


def test_modes_that_lines_ahead_of_the_first_step_have_set_are_those_of_the_beginning() -> None:
    model, store = frozen_model(), ShardStore()
    registered, _ = state_of(model)
    store.register(0, registered.first)
    registered.load(registered.first, step=0)
    model.train()
    keep_modes_behind(None, registered, store)
    for text in (registered.first, store.registered(0) or ""):
        model.eval()
        registered.load(text, step=0)
        assert all(module.training for module in model.modules())

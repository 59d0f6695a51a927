"""Changes at places where they would be lost, or would depend on the worker: each ends with a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.errors import InexactError, TaskError
from tests.cases import tried_each_time
from tests.session import loops
from tests.session.loops import Average, Loop, by_task, compute, optimizer_of, run, schedule
from tests.training.harness import Gpt, GptTask, Outcome, samples

pytestmark = pytest.mark.procs
STEPS = 4
HERE, LOOP = re.escape(__file__), re.escape(loops.__file__)


# -- between build and shard --


def draws_again(model: nn.Module) -> None:
    nn.init.normal_(model.get_parameter("embedding.weight"))


def draws_in_data(model: nn.Module) -> None:
    model.get_parameter("embedding.weight").data[0].zero_()


def loads(model: nn.Module) -> None:
    model.load_state_dict(Gpt().state_dict())


def moves(model: nn.Module) -> None:
    model.to("cpu")


def reads(model: nn.Module) -> None:
    model.get_parameter("embedding.weight").norm().item()


def adds_a_head(model: nn.Module) -> None:
    model.other = nn.Linear(3, 3)


def converts(model: nn.Module) -> None:
    model.to(torch.float64)


def replaces(model: nn.Module) -> None:
    model.get_submodule("embedding").weight = nn.Parameter(torch.zeros(model.get_parameter("embedding.weight").shape))


def removes(model: nn.Module) -> None:
    del model.get_submodule("blocks.0").gains


class Changing(Loop):
    """Changes the model before it has memory."""

    def __init__(self, change: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self._change = change

    def built(self, model: nn.Module) -> None:
        self._change(model)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (draws_again, r":\d+: normal_ of 'embedding\.weight' would be lost: .*init_weights="),
        (draws_in_data, r":\d+: zero_ of 'embedding\.weight' would be lost"),
        (loads, r":\d+: copy_ of 'embedding\.weight' would be lost"),
        (
            moves,
            (
                r"test_lost_changes\.py:\d+: the values of 'embedding\.weight' were read, or moved to a device.* A "
                r"line that moves the model, such as model\.to\(device\): delete it"
            ),
        ),
        (reads, r":\d+: the values of .* were read"),
        (adds_a_head, r":\d+: the parameter 'other\.weight' was added behind session\.build"),
        (converts, r":\d+: the parameter 'embedding\.weight' was replaced, tied or converted"),
        (replaces, r":\d+: the parameter 'embedding\.weight' was replaced, tied or converted"),
        (removes, r":\d+: the parameter 'blocks\.0\.gains' was removed behind session\.build"),
    ],
)
def test_a_change_of_the_model_before_it_has_memory_is_refused(
    change: Callable[[nn.Module], None], sentence: str
) -> None:
    with pytest.raises(TaskError, match=sentence):
        run(1, Changing(change), steps=STEPS)


def test_an_error_names_the_scripts_line_and_not_that_of_an_installed_package() -> None:
    names: dict[str, Any] = {"__name__": "library", "line_here": line_here}
    source = "def moves():\n    return line_here()\n"
    exec(compile(source, "/env/lib/site-packages/library/parts.py", "exec"), names)  # noqa: S102 - a package's file
    assert names["moves"]().startswith(f"{__file__}:")


def freezes(model: nn.Module) -> None:
    model.get_parameter("blocks.0.up.weight").requires_grad_(False)


class Frozen(Gpt):
    def __init__(self) -> None:
        super().__init__()
        freezes(self)


def test_a_parameter_that_is_frozen_before_it_has_memory_stays_frozen() -> None:
    frozen = run(2, Changing(freezes), steps=3)
    assert frozen.bits == run(1, Loop(Frozen), steps=3).bits
    assert frozen.bits != by_task(3).bits


# -- parameters of earlier generations --


class Keeping(Loop):
    """Uses parameters that it has kept, from one place or from every place, in the third step."""

    def __init__(self, place: str, use: Callable[[list[nn.Parameter]], Any]) -> None:
        super().__init__()
        self._place, self._use = place, use
        self._kept: list[nn.Parameter] = []

    def built(self, model: nn.Module) -> None:
        if self._place in ("built", "everywhere"):
            self._kept += model.parameters()

    def left(self, session: Session, step: UserStep, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step.number == 1 and self._place in ("left", "everywhere"):
            self._kept += model.parameters()
        if step.number == 1 and self._place in ("groups", "everywhere"):
            self._kept += [param for group in optimizer.param_groups for param in group["params"]]
        if step.number == 3:
            self._use(self._kept)


def clips(params: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(params, 1.0)


def averages(params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        params[0].lerp_(params[0], 0.5)


def counts(params: list[nn.Parameter]) -> None:
    assert sum(param.numel() for param in params if param.requires_grad) > 0


PLACES = {"built": "from before session", "left": "of an", "groups": "of an"}


@pytest.mark.parametrize(
    ("place", "use"),
    tried_each_time([("built", clips), ("left", averages)], product(PLACES, [clips, averages])),
)
def test_the_use_of_a_parameter_of_an_earlier_generation_is_refused(
    place: str, use: Callable[[list[nn.Parameter]], Any]
) -> None:
    with pytest.raises(
        TaskError, match=HERE + rf":\d+: a parameter {PLACES[place]}.* was used: .*model\.parameters\(\)"
    ):
        run(2, Keeping(place, use), kills=[(1, 2, "forward")], steps=STEPS)


@pytest.mark.long  # loops that keep parameters are run each time: tests/session/test_kept_views.py
def test_parameters_may_be_kept_and_counted() -> None:
    loop = Keeping("everywhere", counts)
    assert run(2, loop, kills=[(1, 2, "forward")], steps=STEPS).bits == by_task(STEPS).bits


class SecondOptimizer(Loop):
    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def left(self, session: Session, step: UserStep, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step.number == self._step:
            self._other = torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1)


@pytest.mark.parametrize("step", tried_each_time([1], [1, 2, 3]))
def test_a_second_optimizer_with_parameters_of_the_model_is_refused(step: int) -> None:
    with pytest.raises(InexactError, match=r"a second optimizer, SGD, has parameters of the model: .*one optimizer"):
        run(1, SecondOptimizer(step), steps=5)


# -- state that is not registered --


class Counting(Loop):
    """Its counter decides the rate, at a place of the step."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place, self._count = place, 0

    def _decide(self, place: str) -> None:
        if place == self._place:
            self._count += 1
            self._optimizer.param_groups[0]["lr"] = 0.01 / self._count

    def __call__(self, session: Session) -> None:
        model = session.build(Gpt)
        self._optimizer = optimizer_of(model)
        session.shard(model, self._optimizer)
        for step in session.steps():
            with step:
                self._decide("entered")
                for batch in step.microbatches():
                    compute(step, model, batch)
                self._decide("computed")
                self._optimizer.step()
                self._decide("applied")


@pytest.mark.parametrize(
    ("place", "phase"),
    tried_each_time(
        [("applied", "snapshot")],
        [("entered", "forward"), ("entered", "snapshot"), ("computed", "apply"), ("applied", "snapshot")],
    ),
)
def test_a_counter_that_does_not_go_back_with_the_step_ends_the_run(place: str, phase: str) -> None:
    sentence = r"step [23] is computed again.* with other settings than before: optimizer\[0\]\.lr = .*register it"
    with pytest.raises(InexactError, match=sentence):
        run(2, Counting(place), kills=[(1, 3, phase)], steps=STEPS)


class Late(Loop):
    """From the third step on, its loss depends on something else than the microbatch."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what, self._count = what, 0

    def __call__(self, session: Session) -> None:
        model = session.build(Gpt)
        optimizer = optimizer_of(model)
        session.shard(model, optimizer)
        for step in session.steps():
            with step:
                for batch in step.microbatches():
                    self._count += 1
                    other = session.rank if self._what == "rank" else self._count
                    factor = 1 + 0.1 * (other % 7) if step.number > 2 else 1.0
                    step.backward(model(batch[:, :-1]).logsumexp(-1).mean() * factor)
                optimizer.step()


@pytest.mark.parametrize(
    ("what", "workers"), tried_each_time([("count", 1)], [("rank", 2), ("count", 1), ("count", 3)])
)
def test_a_loss_that_comes_to_depend_on_the_worker_or_the_past_ends_the_run(what: str, workers: int) -> None:
    with pytest.raises(InexactError, match=r"step 4: microbatches .* have another .*step\.number and step\.microbatch"):
        run(workers, Late(what), steps=5)


# -- modes, hooks, gradients --


class Holding(Loop):
    """Keeps its model, for what a test does with it at a place of the loop."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place

    def built(self, model: nn.Module) -> None:
        self._model = model


class Modes(Holding):
    """Puts a part in eval mode from a step on."""

    def __init__(self, place: str, first: int) -> None:
        super().__init__(place)
        self._first = first

    def _set(self, place: str, number: int) -> None:
        if place == self._place and number >= self._first:
            self._model.get_submodule("blocks.0").eval()

    def entered(self, session: Session, step: UserStep) -> None:
        self._set("entered", step.number)


@cache
def alone_in_eval_mode() -> Outcome:
    return run(1, Modes("entered", 2), steps=STEPS)


@pytest.mark.long  # a worker that joins has the mode, too: that is tried each time
def test_a_part_that_the_loop_puts_in_eval_mode_stays_in_it() -> None:
    alone = alone_in_eval_mode()
    assert alone.bits != by_task(STEPS).bits
    assert run(2, Modes("entered", 2), kills=[(1, 3, "backward")], steps=STEPS).bits == alone.bits


class Once(Modes):
    """Sets the mode in one step alone, which a worker that joins later has not done."""

    def _set(self, place: str, number: int) -> None:
        if number == self._first:
            super()._set(place, number)


def test_modes_are_handed_to_a_worker_that_joins() -> None:
    alone = alone_in_eval_mode()
    assert alone.bits != by_task(STEPS).bits
    assert run(2, Once("entered", 2), kills=[(1, 3, "forward")], steps=STEPS).bits == alone.bits


class Hooking(Loop):
    def left(self, session: Session, step: UserStep, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.get_parameter("embedding.weight").register_hook(lambda gradient: gradient * 2)


def test_a_gradient_hook_behind_shard_is_refused() -> None:
    with pytest.raises(
        InexactError, match=r"a gradient hook was registered on the parameter 'embedding\.weight' behind"
    ):
        run(1, Hooking(), steps=STEPS)


class Dropping(Loop):
    def __init__(self, drop: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
        super().__init__()
        self._drop = drop

    def __call__(self, session: Session) -> None:
        model = session.build(Gpt)
        optimizer = optimizer_of(model)
        session.shard(model, optimizer)
        for step in session.steps():
            with step:
                for batch in step.microbatches():
                    compute(step, model, batch)
                if step.number == 3:  # no step in which bits are compared
                    self._drop(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()


def drops_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def drops_the_models(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def drops_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][0].grad = None


@pytest.mark.parametrize("drop", tried_each_time([drops_one], [drops_all, drops_the_models, drops_one]))
def test_gradients_that_are_dropped_ahead_of_the_optimizers_step_are_missed(
    drop: Callable[[nn.Module, torch.optim.Optimizer], Any],
) -> None:
    with pytest.raises(InexactError, match=r":\d+: gradients were dropped between .*or not at all"):
        run(2, Dropping(drop), steps=STEPS)


def passes(model: nn.Module, optimizer: torch.optim.Optimizer) -> None: ...


def reads_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    norms = [param.grad.norm().item() for group in optimizer.param_groups for param in group["params"]]
    assert any(norm > 0 for norm in norms)


def test_gradients_can_be_read_from_the_optimizers_parameters() -> None:
    assert run(2, Dropping(reads_gradients), steps=3).bits == run(1, Dropping(passes), steps=3).bits


# -- parameters --


class Writing(Loop):
    """Makes all parameters smaller, at a place of the loop."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place

    def __call__(self, session: Session) -> None:
        model = session.build(Gpt)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        session.shard(model, optimizer, scheduler=scheduler, average=Average())
        self._write("shard", model)
        for step in session.steps():
            with step:
                self._write("entered", model)
                for batch in step.microbatches():
                    self._write("body", model)
                    compute(step, model, batch)
                self._write("computed", model)
                optimizer.step()
                self._write("applied", model)
                scheduler.step()

    def _write(self, place: str, model: nn.Module) -> None:
        if place == self._place:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.9)


AHEAD = [
    ("shard", r"parameters changed between session\.shard and the first step"),
    ("computed", r":\d+: parameters changed between the step's beginning and optimizer\.step"),
    ("entered", r":\d+: parameters changed between the step's beginning and optimizer\.step"),
]


@pytest.mark.parametrize(("place", "sentence"), tried_each_time(AHEAD[:2], AHEAD))
def test_parameters_that_are_changed_ahead_of_the_optimizers_step_are_missed(place: str, sentence: str) -> None:
    with pytest.raises(InexactError, match=sentence):
        run(1, Writing(place), steps=STEPS)


def test_parameters_that_are_changed_in_the_body_end_the_run() -> None:
    with pytest.raises(InexactError, match=r"step 1: no worker got the same gradient twice"):
        run(2, Writing("body"), steps=STEPS)


def test_a_change_of_parameters_behind_the_optimizers_step_is_named_once() -> None:
    outcome = run(2, Writing("applied"), steps=3)
    assert outcome.bits == run(1, Writing("applied"), steps=3).bits
    remarks = [text for fields in outcome.of("step") for text in fields.get("remarks", ())]
    assert len([text for text in remarks if "changes parameters behind optimizer.step()" in text]) == 1


# -- other forwards --


class OwnForward(Holding):
    """A further forward, on all workers or on the first alone."""

    def __init__(self, place: str, *, alone: bool = False) -> None:
        super().__init__(place)
        self._alone = alone

    def _forward(self, place: str, session: Session) -> None:
        if place == self._place and not (self._alone and session.rank):
            with torch.no_grad():
                self._model.eval()
                self._model(torch.zeros(1, 8, dtype=torch.int64))
                self._model.train()

    def entered(self, session: Session, step: UserStep) -> None:
        self._forward("entered", session)

    def applied(self, session: Session, *_: object) -> None:
        self._forward("applied", session)

    def left(self, session: Session, *_: object) -> None:
        self._forward("left", session)


@pytest.mark.long  # such forwards are ahead of weights that change, each time
def test_a_forward_of_all_workers_behind_the_microbatches_changes_no_bit() -> None:
    assert run(2, OwnForward("applied"), kills=[(1, 3, "backward")], steps=STEPS).bits == by_task(STEPS).bits


@pytest.mark.parametrize(
    ("workers", "loop", "error", "sentence"),
    [
        (2, OwnForward("applied", alone=True), InexactError, r"step 1: 1 of 2 workers call the model's forward out"),
        *(
            pytest.param(1, OwnForward(place), TaskError, sentence, marks=pytest.mark.long)  # `test_misuse.py` has both
            for place, sentence in {
                "entered": r":\d+: a forward of the model came ahead of the microbatches\.",
                "left": r":\d+: a forward of the model belongs into `with step:`",
            }.items()
        ),
    ],
)
def test_a_forward_at_another_place_or_of_some_workers_is_refused(
    workers: int, loop: Loop, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        run(workers, loop, steps=STEPS)


STALE = ["computed", "applied", "evaluated"]


class Stale(OwnForward):
    """In a step that is not proven, another forward gathers the weights, and then they change. Each of `places` has
    another step, from step 4 on."""

    def __init__(self, places: list[str]) -> None:
        super().__init__("")
        self._places = {4 + number: place for number, place in enumerate(places)}

    def _forward_at(self, place: str, session: Session, step: UserStep) -> None:
        if self._places.get(step.number) == place:
            self._place = place
            self._forward(place, session)

    def computed(self, session: Session, step: UserStep, model: nn.Module) -> None:
        self._forward_at("computed", session, step)

    def applied(self, session: Session, step: UserStep, *_: object) -> None:  # type: ignore[override]
        self._forward_at("applied", session, step)
        place = self._places.get(step.number)
        if place == "evaluated":
            self._evaluate(session)
        if place in ("applied", "evaluated"):
            with torch.no_grad():
                for param in self._model.parameters():
                    param.mul_(0.9)

    def _evaluate(self, session: Session) -> None:
        session.evaluate(self.loss, samples()[:5])

    def loss(self, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        return GptTask().loss(self._model, batch)


class Shrinking(Stale):
    """As `Stale`, without another forward."""

    def _forward(self, place: str, session: Session) -> None: ...

    def _evaluate(self, session: Session) -> None: ...


@pytest.mark.parametrize(
    ("places", "workers"),
    tried_each_time([(STALE, 2)], [(STALE, 2), *product(([place] for place in STALE), [1, 2, 3])]),
)
def test_weights_that_change_behind_another_forward_are_gathered_anew(places: list[str], workers: int) -> None:
    steps = 4 + len(places)
    plain = run(1, Shrinking(places), steps=steps)
    assert run(workers, Stale(places), steps=steps).losses == plain.losses

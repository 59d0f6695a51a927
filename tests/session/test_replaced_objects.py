"""A loop that puts other objects in the place of the run's own, or calls by what differs between workers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import raysharded as rs
from raysharded.actors.session.parameter_tensors import Rule, _digest_of
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from raysharded.errors import InexactError, RayshardedError, TaskError
from tests.cases import tried_each_time
from tests.session.loops import Loop, by_task, compute, optimizer_of, run, schedule
from tests.session.test_in_a_step import HELD_OUT
from tests.training.harness import SEQUENCE, Gpt, GptTask, Outcome

pytestmark = pytest.mark.procs
FILE = re.escape(__file__)


class Acting:
    """The loop of the tests' GPT; a test acts in the body, behind the update, and outside the `with`."""

    def __init__(
        self,
        behind: Callable[..., None] | None = None,
        *,
        body: Callable[..., float] | None = None,
        outside: Callable[..., None] | None = None,
        clip: Callable[[Session, UserStep], None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._behind, self._body, self._outside, self._clip, self._dtype = behind, body, outside, clip, dtype

    def __call__(self, session: Session) -> None:
        model = session.build(Gpt)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        average = rs.ParameterTensors(dtype=self._dtype)
        session.shard(model, optimizer, scheduler=scheduler, average=average)
        objects: dict[str, Any] = {"session": session, "model": model, "optimizer": optimizer, "average": average}
        for step in session.steps():
            with step:
                for batch in step.microbatches():
                    if self._body is None:
                        compute(step, model, batch)
                    else:
                        logits = model(batch[:, :-1])
                        step.backward(logits.pow(2).mean() * self._body(step=step, **objects))
                if self._clip is None:
                    step.clip_grad_norm_(0.7)
                else:
                    self._clip(session, step)
                optimizer.step()
                scheduler.step()
                if self._behind is not None:
                    self._behind(step=step, **objects)
            if self._outside is not None:
                self._outside(step=step, **objects)


STEPS = 5


@cache
def alone(behind: Callable[..., None] | None = None) -> Outcome:
    return run(1, Acting(behind), steps=STEPS)


# -- assigned memory --


def assigns(*, step: UserStep, optimizer: torch.optim.Optimizer, **_: Any) -> None:
    if step.number == 3:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.data = param.data.clamp(-0.1, 0.1)


def clamps(*, step: UserStep, optimizer: torch.optim.Optimizer, **_: Any) -> None:
    if step.number == 3:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.data.clamp_(-0.1, 0.1)


KILLED = [(1, STEPS, "forward")]


@pytest.mark.parametrize("kills", tried_each_time([[]], [[], KILLED]))
def test_values_that_are_assigned_to_the_optimizers_parameters_are_those_of_a_change_in_place(kills: Any) -> None:
    plain = alone(clamps)
    assert plain.bits != alone().bits
    assert run(2, Acting(assigns), kills=kills, steps=STEPS).bits == plain.bits


def replaces(*, step: UserStep, model: Any, **_: Any) -> None:
    if step.number == 3:
        model.norm.weight = nn.Parameter(torch.zeros_like(model.norm.weight))


def freezes_by_a_group(*, step: UserStep, optimizer: torch.optim.Optimizer, **_: Any) -> None:
    if step.number == 3:
        optimizer.param_groups[0]["params"][1].requires_grad_(False)


def moves(*, step: UserStep, optimizer: torch.optim.Optimizer, **_: Any) -> None:
    if step.number == 3:
        first, second = optimizer.param_groups
        second["params"].append(first["params"].pop())


def loads_its_state(*, step: UserStep, optimizer: torch.optim.Optimizer, **_: Any) -> None:
    if step.number == 3:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


REPLACING: list[tuple[Callable[..., None], str]] = [
    (freezes_by_a_group, r"step 3: requires_grad of '.*' was changed"),
    (moves, r"step 3: the optimizer has other groups, or another state"),
    (loads_its_state, r"step 3: .*as after load_state_dict\(\)"),
    (replaces, r"step 3: 'norm\.weight', a parameter of the model or a layer, was replaced"),
]


@pytest.mark.parametrize(("act", "told"), tried_each_time(REPLACING[:3], REPLACING))
def test_objects_that_are_put_in_the_place_of_the_runs_own_are_refused(act: Callable[..., None], told: str) -> None:
    with pytest.raises(InexactError, match=told):
        run(1, Acting(act), steps=4)


def freezes(*, step: UserStep, model: Any, **_: Any) -> None:
    if step.number == 3:
        model.norm.weight.requires_grad_(False)


def clears(*, step: UserStep, optimizer: torch.optim.Optimizer, **_: Any) -> None:
    if step.number == 3:
        optimizer.state.clear()


def replaces_a_layer(*, step: UserStep, model: Any, **_: Any) -> None:
    if step.number == 3:
        model.norm = nn.LayerNorm(model.norm.weight.shape)


def adds_to_a_buffer(*, step: UserStep, model: Any, **_: Any) -> None:
    if step.number == 3:
        next(model.buffers()).add_(1)


def calls_backward(*, step: UserStep, model: Any, **_: Any) -> None:
    if step.number == 3:
        model(torch.zeros(2, SEQUENCE, dtype=torch.long)).sum().backward()


def adds_a_group(*, step: UserStep, optimizer: torch.optim.Optimizer, **_: Any) -> None:
    if step.number == 3:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def evaluates_on_one(*, session: Session, step: UserStep, model: Any, **_: Any) -> None:
    """Step 5 is not proven."""
    if step.number == 4 and session.rank == 1:
        model.eval()


OTHERS = [
    (Acting(outside=evaluates_on_one), 2, r"step 5: .*modes.* differ between workers: .* worker 1 modes\[0\] = ''"),
    (Acting(replaces_a_layer), 1, r"step 3: 'norm', a parameter of the model or a layer, was replaced"),
    (Acting(clears), 1, r"entries of the optimizer's state of '.*' were deleted, as after optimizer\.state\.clear"),
    (Acting(outside=clears), 1, r"entries of the optimizer's state were dropped.* between step 3 and the next"),
    (Acting(adds_to_a_buffer), 1, r"buffer 'positions' changed in a forward, or in the loop"),
    (Acting(calls_backward), 1, r"a gradient of the parameters of .* came behind the microbatches"),
]
BEFORE_A_RELEASE = [
    (Acting(outside=adds_a_group), 1, r"step 4: the optimizer has other groups"),
    (Acting(outside=replaces), 1, r"step 4: 'norm\.weight', a parameter of the model or a layer, was replaced"),
    (Acting(outside=assigns), 1, r"parameters changed between step 3 and the next"),
]
"""Changes that others make at another place."""


@pytest.mark.parametrize(("loop", "workers", "told"), tried_each_time(OTHERS, [*OTHERS, *BEFORE_A_RELEASE]))
def test_what_a_loop_changes_behind_the_microbatches_is_refused_by_its_name(
    loop: Acting, workers: int, told: str
) -> None:
    with pytest.raises(InexactError, match=told):
        run(workers, loop, steps=5)


def changes_state_outside(*, step: UserStep, optimizer: torch.optim.Optimizer, **_: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.1)


def test_state_of_the_optimizer_that_changes_outside_the_with_is_refused() -> None:
    with pytest.raises(InexactError, match=r"changed .*step 1"):
        run(1, Acting(outside=changes_state_outside), steps=3)


def looks_ahead(*, step: UserStep, optimizer: torch.optim.Optimizer, **_: Any) -> None:
    """As Lookahead: slow weights beside the optimizer's state, from the third step on, which is not watched."""
    for group in optimizer.param_groups if step.number > 2 else ():
        for param in group["params"]:
            optimizer.state[param].setdefault("slow", param.detach().clone())


def adds_in_the_body(*, step: UserStep, optimizer: torch.optim.Optimizer, **_: Any) -> float:
    if step.number == 4:
        optimizer.state[optimizer.param_groups[0]["params"][0]]["scale"] = torch.ones(())
    return 1.0


def decays_in_the_body(*, step: UserStep, optimizer: torch.optim.Optimizer, **_: Any) -> float:
    if step.number == 2:
        changes_state_outside(step=step, optimizer=optimizer)
    return 1.0


@pytest.mark.parametrize(
    ("loop", "told"),
    [
        (
            Acting(looks_ahead),
            r"step 3: the loop adds 'slow' to optimizer\.state, .* slow=raysharded\.ParameterTensors\(\)",
        ),
        (Acting(body=adds_in_the_body), r"step 4: the loop adds 'scale' to optimizer\.state"),
        (Acting(body=decays_in_the_body), r"step 2: the optimizer's state changed between the step's beginning and"),
    ],
    ids=["looks ahead", "adds in the body", "decays in the body"],
)
def test_state_that_a_loop_keeps_beside_the_optimizers_own_is_refused(loop: Acting, told: str) -> None:
    with pytest.raises(InexactError, match=told):
        run(1, loop, steps=5)


def restarts(*, step: UserStep, model: Any, optimizer: torch.optim.Optimizer, **_: Any) -> None:
    """Set the moments to 0 in place. Reading the state of another parameter makes an empty one."""
    for state in list(optimizer.state.values()) if step.number == 4 else ():
        if state:
            state["exp_avg"].zero_()
    assert not optimizer.state[nn.Parameter(torch.zeros(1))]


@pytest.mark.parametrize("kills", tried_each_time([[]], [[], KILLED]))
def test_state_of_the_optimizer_may_be_changed_in_place_behind_its_step(kills: Any) -> None:
    plain = alone(restarts)
    assert plain.bits != alone().bits
    assert run(2, Acting(restarts), kills=kills, steps=STEPS).bits == plain.bits
    remarks = [text for fields in plain.of("step") for text in fields.get("remarks", ())]
    assert len([text for text in remarks if "changes the optimizer's state behind optimizer.step()" in text]) == 1


def penalty_of_groups(*, optimizer: torch.optim.Optimizer, **_: Any) -> Any:
    return 1 + sum(param.pow(2).sum() for group in optimizer.param_groups for param in group["params"])


def test_a_gradient_of_the_optimizers_own_parts_is_refused() -> None:
    with pytest.raises(InexactError, match="a penalty on weights there would be lost"):
        run(1, Acting(body=penalty_of_groups), steps=2)


def penalty_of_parts(*, model: Any, **_: Any) -> Any:
    return 1 + sum(param.to_local().pow(2).sum() for param in model.parameters() if isinstance(param, DTensor))


def penalty_of_sharded_parameters(*, model: Any, **_: Any) -> Any:
    return 1 + model.blocks[0].up.weight.full_tensor().pow(2).sum()


PENALTIES = [penalty_of_parts, penalty_of_sharded_parameters]


@pytest.mark.parametrize(("workers", "penalty"), tried_each_time([(2, PENALTIES[0])], product([1, 2], PENALTIES)))
def test_a_gradient_of_a_workers_parts_of_the_model_is_refused(workers: int, penalty: Callable[..., Any]) -> None:
    with pytest.raises(InexactError, match=r"a gradient came to '.*' from outside the forward of its unit"):
        run(workers, Acting(body=penalty), steps=2)


# -- calls that all workers make alike --


def clips_by_rank(session: Session, step: UserStep) -> None:
    step.clip_grad_norm_(0.7 if session.rank == 0 else 0.3)


def clips_twice(session: Session, step: UserStep) -> None:
    step.clip_grad_norm_(0.1)
    step.clip_grad_norm_(0.7)


def updates_on_one(*, session: Session, average: rs.ParameterTensors, **_: Any) -> None:
    if session.rank == 0:
        average.update(lambda mean, weight: mean.lerp_(weight, 0.25))


def updates_by_its_part(*, optimizer: torch.optim.Optimizer, average: rs.ParameterTensors, **_: Any) -> None:
    share = float(optimizer.param_groups[0]["params"][0].detach().abs().mean())
    average.update(lambda mean, weight: mean.lerp_(weight, share))


def test_rules_are_told_apart_by_their_values() -> None:
    def lerp(share: float) -> Rule:
        return lambda mean, weight: mean.lerp_(weight, share)

    assert _digest_of(lerp(0.25)) == _digest_of(lerp(0.25)) != _digest_of(lerp(0.5))


@pytest.mark.parametrize(
    ("workers", "loop", "kind", "told"),
    [
        (2, Acting(clip=clips_by_rank), InexactError, r"step 1: .*clip_grad_norm_ = 0\.7, worker 1 .*= 0\.3"),
        (1, Acting(clip=clips_twice), TaskError, FILE + r":\d+: step\.clip_grad_norm_\(\) was called twice in step 1"),
        (2, Acting(updates_on_one), InexactError, r"step 1: .* differ between workers: worker 0 has average\.update"),
        pytest.param(
            *(2, Acting(updates_by_its_part), InexactError, r"step 1: .*average\.update = "), marks=pytest.mark.long
        ),
    ],
    ids=["clip by rank", "clip twice", "update on one", "update by its part"],
)
def test_calls_that_differ_between_workers_are_refused(
    workers: int, loop: Any, kind: type[RayshardedError], told: str
) -> None:
    with pytest.raises(kind, match=told):
        run(workers, loop, steps=3)


def nests(*, average: rs.ParameterTensors, **_: Any) -> None:
    with average.as_parameters(), average.as_parameters():
        pass


def updates_inside(*, average: rs.ParameterTensors, **_: Any) -> None:
    with average.as_parameters():
        average.update(lambda mean, weight: mean.lerp_(weight, 0.25))


@pytest.mark.parametrize("act", tried_each_time([updates_inside], [nests, updates_inside]))
def test_what_would_act_on_exchanged_values_is_refused(act: Callable[..., None]) -> None:
    with pytest.raises(TaskError, match=r":\d+: .* came inside as_parameters\(\)"):
        run(1, Acting(act), steps=2)


def updates(*, average: rs.ParameterTensors, **_: Any) -> None:
    average.update(lambda mean, weight: mean.lerp_(weight, 0.25))


def updates_and_looks(*, average: rs.ParameterTensors, **_: Any) -> None:
    updates(average=average)
    with average.as_parameters():
        pass


@pytest.mark.parametrize("dtype", tried_each_time([torch.bfloat16], [torch.bfloat16, torch.float64]))
def test_tensors_of_another_dtype_and_the_parameters_keep_their_bits(dtype: torch.dtype) -> None:
    looked, plain = (run(1, Acting(act, dtype=dtype), steps=3).bits for act in (updates_and_looks, updates))
    assert looked == plain


# -- what a kill must not lose --


def evaluates_a_part(*, step: UserStep, model: Any, **_: Any) -> None:
    if step.number == 3:
        model.blocks[0].eval()


@pytest.mark.long  # one that is set once in a step is tried each time: tests/session/test_lost_changes.py
def test_a_mode_that_is_set_behind_the_update_outlives_a_kill() -> None:
    one = alone(evaluates_a_part)
    assert one.bits != alone().bits
    assert run(2, Acting(evaluates_a_part), kills=[(1, 4, "forward")], steps=STEPS).bits == one.bits


def evaluates_a_part_and_held_out_data(*, session: Session, step: UserStep, model: Any, **others: Any) -> None:
    evaluates_a_part(step=step, model=model)
    session.evaluate(lambda batch: GptTask().loss(model, batch), HELD_OUT)
    assert model.blocks[0].training == model.blocks[0].norm_1.training == (step.number < 3)
    assert model.norm.training


def test_a_mode_that_is_set_behind_the_update_outlives_an_evaluation() -> None:
    plain, evaluated = alone(evaluates_a_part), alone(evaluates_a_part_and_held_out_data)
    assert evaluated.fingerprint == plain.fingerprint
    assert evaluated.losses == plain.losses


@pytest.mark.long  # `test_modes_between_steps.py` has one that outlives a join
def test_a_mode_that_is_set_outside_the_with_outlives_a_kill() -> None:
    one = alone(evaluates_a_part)
    assert run(2, Acting(outside=evaluates_a_part), kills=[(1, 4, "forward")], steps=STEPS).bits == one.bits


def draws_late(*, session: Session, step: UserStep, **_: Any) -> float:
    return 1.0 if step.number < 3 else 1 + torch.rand((), generator=session.generator("late")).item()


@pytest.mark.long  # a held-out loss makes one each time: tests/session/test_proven_evaluations.py
def test_a_generator_that_is_made_late_draws_the_same_everywhere() -> None:
    one = run(1, Acting(body=draws_late), steps=STEPS)
    assert run(2, Acting(body=draws_late), kills=[(1, 4, "forward")], steps=STEPS).bits == one.bits


class Saving(Loop):
    def applied(self, session: Session, step: UserStep, *_: object) -> None:
        if step.number == 3:
            session.save()


@pytest.mark.long  # one of a step that is done again is tried each time: tests/session/test_in_a_step.py
@pytest.mark.parametrize("kill", [(1, 4, "forward"), (1, 3, "snapshot")])
def test_a_checkpoint_that_was_requested_outlives_a_kill(kill: tuple[int, int, str]) -> None:
    """With a kill in its snapshot step 3 is done again, and requests it again."""
    found = run(2, Saving(), kills=[kill], steps=5)
    assert found.bits == by_task(5).bits
    assert [fields["step"] for fields in found.of("checkpoint")] == [4, 5]

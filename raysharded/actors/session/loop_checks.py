"""Checks of what a user's loop gives to a session, and leaves behind a step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from raysharded.actors.model.sharded_model import clean_name
from raysharded.actors.optimizer.built_optimizer import BuiltOptimizer
from raysharded.actors.optimizer.held_parameters import ParameterForms
from raysharded.actors.optimizer.inner_optimizers import OptimizerParts
from raysharded.actors.optimizer.registered_state import RegisteredState, Stateful
from raysharded.actors.session.loop_errors import changed_parameters
from raysharded.actors.shards.store import ShardStore
from raysharded.actors.task_calls.object_contents import reachable
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.errors import InexactError, TaskError

if TYPE_CHECKING:
    from torch import nn

    from raysharded.actors.session.step_comparisons import StepWatch
    from raysharded.actors.step.engine import Engine


def built_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, things: dict[str, Stateful]) -> BuiltOptimizer:
    """The optimizer, as built; refuses parameters that a later generation could not exchange."""
    names = {id(param): clean_name(name) for name, param in model.named_parameters()}
    own = BuiltOptimizer(optimizer)
    strange = next((param for held in own.parts.lists for param in held if id(param) not in names), None)
    if strange is not None:
        raise TaskError(
            f"{line_here()}: the optimizer has a parameter of shape {tuple(strange.shape)} that is not in the "
            "model that session.build returned: build it of model.parameters(), or a part of them."
        )
    forms, around = ParameterForms(model), [*model.modules(), *own.parts.lists, *(p.state for p in own.parts.all)]
    for name, one in {"optimizer": optimizer, **things}.items():
        for path, param in forms.ways_from(one, around):
            raise TaskError(
                f"{line_here()}: {name}{path} refers to the parameter {param!r}, and each generation of workers "
                "has others. Let it take parameters from optimizer.param_groups or the model when it needs them."
            )
    own.note(names)
    own.keeps_groups, own.registered = True, tuple(things.values())
    return own


def require_unchanged(
    engine: Engine, registered: RegisteredState, store: ShardStore, at_shard: int | None, newest: StepWatch | None
) -> None:
    """Raise InexactError if state has changed since the end of the newest step.

    `at_shard`: digest of parameters and optimizer state as `session.shard` returned; None if it was not taken, or is of
    an earlier generation. `newest`: of the newest step, if it is of this generation.
    """
    step = engine.step
    at_end = None if newest is None else newest.at_end
    before = at_shard if at_end is None else at_end
    if before is not None and before != engine.steps.digest("state"):
        raise changed_parameters(step if at_end is not None else None)
    identities = engine.steps.parts.optimizer.built.parts.identities()
    if newest is not None and newest.identities not in (None, identities):
        raise InexactError(
            f"{line_here()}: entries of the optimizer's state were dropped, added or replaced between step {step} and "
            "the next, as by optimizer.state.clear(): a worker that joins would not know. Change its tensors in place, "
            "in the `with`, behind optimizer.step()."
        )
    kept = store.registered(step)
    assert kept is not None
    if registered.modes is not None:
        registered.modes.take_over()
        kept = registered.with_modes(kept)
        store.amend(step, kept)
    change = registered.change_since(kept)
    if change is not None:
        raise InexactError(
            f"{line_here()}: registered state, or a setting of the optimizer's groups, changed between step {step} and "
            f"the next: {change}. Move what changes it, such as scheduler.step(), into `with step:`, behind "
            "optimizer.step(). Outside it would be lost with a worker."
        )


def require_registered(optimizer: torch.optim.Optimizer, things: dict[str, Stateful]) -> None:
    """Raise InexactError if a scheduler of this optimizer is in none of the registered objects, or if another optimizer
    has a parameter of its."""
    known = {id(one) for thing in things.values() for _, one in reachable(thing, without=[optimizer])}
    own = OptimizerParts(optimizer)
    params, groups = {id(param) for held in own.lists for param in held}, {id(group) for group in own.groups}
    for one in _instances_of((LRScheduler, torch.optim.Optimizer)):
        if isinstance(one, torch.optim.Optimizer):
            others = [group for group in one.param_groups if id(group) not in groups]  # a wrapper has the same groups
            if any(id(param) in params for group in others for param in group["params"]):
                raise InexactError(
                    f"{line_here()}: a second optimizer, {type(one).__name__}, has parameters of the model: its state "
                    "would be lost with a worker. Give session.shard one optimizer for all parameters, with several "
                    "groups; or one class that steps several optimizers which it holds."
                )
        elif id(one) not in known and vars(one).get("optimizer") is optimizer:
            raise InexactError(
                f"{line_here()}: a {type(one).__name__} of the optimizer is not registered: it would not go back with "
                "a step. Make it ahead of session.shard, and give it there: session.shard(model, optimizer, "
                "scheduler=scheduler)."
            )


def _instances_of(kinds: tuple[type, ...]) -> list[Any]:
    """All objects of these classes, in one pass that tests each class once."""
    wanted: dict[type, bool] = {}
    found = []
    for one in gc.get_objects():
        kind = type(one)
        if kind not in wanted:
            wanted[kind] = issubclass(kind, kinds)
        if wanted[kind]:
            found.append(one)
    return found


def hook(optimizer: torch.optim.Optimizer, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Call `before` ahead of all step hooks that there are, and `after` behind them."""
    handle = optimizer.register_step_pre_hook(before)
    hooks = optimizer._optimizer_step_pre_hooks
    others = {key: hooks.pop(key) for key in list(hooks) if key != handle.id}
    hooks.update(others)
    optimizer.register_step_post_hook(after)

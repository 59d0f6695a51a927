"""Checks of what a user's loop gives to a session, and leaves behind a step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from raysharded.actors.model.sharded_model import clean_name
from raysharded.actors.optimizer.built_optimizer import BuiltOptimizer
from raysharded.actors.optimizer.held_parameters import ParameterForms
from raysharded.actors.optimizer.inner_optimizers import OptimizerParts, bits_of
from raysharded.actors.optimizer.registered_state import RegisteredState, Stateful
from raysharded.actors.session.loop_errors import changed_parameters
from raysharded.actors.shards.store import ShardStore
from raysharded.actors.task_calls.object_contents import reachable
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.errors import InexactError, TaskError

if TYPE_CHECKING:
    from torch import nn

    from raysharded.actors.session.step_comparisons import StepWatch
    from raysharded.actors.session.user_step import UserStep
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
    kept = keep_modes(registered, store, step, is_behind=True)
    assert kept is not None
    change = registered.change_since(kept)
    if change is not None:
        raise InexactError(
            f"{line_here()}: registered state, or a setting of the optimizer's groups, changed between step {step} and "
            f"the next: {change}. Move what changes it, such as scheduler.step(), into `with step:`, behind "
            "optimizer.step(). Outside it would be lost with a worker."
        )


def keep_modes(registered: RegisteredState, store: ShardStore, step: int, *, is_behind: bool) -> str | None:
    """The registered state as of the newest step, now with the modes that lines behind it have set; None if it is lost.

    `is_behind`: these lines found the step done.
    """
    kept = store.registered(step)
    if kept is not None and registered.modes is not None:
        registered.modes.take_over()
        kept = registered.with_modes(kept)
        store.amend(step, kept, is_behind=is_behind)
        if step == 0:
            registered.first = registered.with_modes(registered.first)
    return kept


def keep_modes_behind(step: UserStep | None, registered: RegisteredState | None, store: ShardStore) -> None:
    """Keep modes that lines behind a step have set, as the workers change ahead of the next one.

    `step`: the newest one; None: the lines are those between `session.shard` and the first step. The state of a step
    that is done again is lost, and these modes with it.
    """
    if registered is not None and registered.modes is not None:
        number = registered.step if step is None else step.number
        keep_modes(registered, store, number, is_behind=step is None or step.done)


def require_registered(optimizer: torch.optim.Optimizer, things: dict[str, Stateful]) -> None:
    """Raise InexactError if a scheduler of this optimizer, or of one inside it, is not registered, or if another
    optimizer has a parameter of its.

    A scheduler is registered by itself, or in the state of a registered object that holds it.
    """
    own = OptimizerParts(optimizer)
    inner, known, holders = {id(one) for one in own.all}, _registered_schedulers(things), _holders(things, own.all)
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
        elif id(one) not in known and id(vars(one).get("optimizer")) in inner:
            holding = holders.get(id(one), [])
            if not holding:
                raise InexactError(
                    f"{line_here()}: a {type(one).__name__} of the optimizer is not registered: it would not go back "
                    "with a step. Make it ahead of session.shard, and give it there: session.shard(model, optimizer, "
                    "scheduler=scheduler)."
                )
            if not any(_saves(things[name], one) or _loads(things[name], one) for name in holding):
                raise InexactError(
                    f"{line_here()}: a {type(one).__name__} of the optimizer is held by the registered {holding[0]!r}, "
                    "whose state_dict() does not have its state: it would not go back with a step. Put "
                    "scheduler.state_dict() into it, and load it there; or register the scheduler itself: "
                    "session.shard(model, optimizer, scheduler=scheduler)."
                )


def _registered_schedulers(things: dict[str, Stateful]) -> set[int]:
    """Identities of the schedulers that are registered themselves, or are parts of torch's own that are."""
    found: dict[int, object] = {}
    left = [one for one in things.values() if isinstance(one, LRScheduler)]
    while left:
        one = left.pop()
        if id(one) not in found:
            found[id(one)] = one
            left += [part for part in getattr(one, "_schedulers", ()) if isinstance(part, LRScheduler)]
    return set(found)


def _holders(things: dict[str, Stateful], optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, list[str]]:
    """Identity of a scheduler -> names of the registered objects that hold it, besides through the optimizers."""
    found: dict[int, list[str]] = {}
    for name, thing in things.items():
        for _, one in reachable(thing, without=optimizers):
            if isinstance(one, LRScheduler):
                found.setdefault(id(one), []).append(name)
    return found


def _saves(holder: Stateful, scheduler: LRScheduler) -> bool:
    """True if the state of a registered object has all of a scheduler's state, as one dict."""
    wanted, left = bits_of(scheduler.state_dict()), [holder.state_dict()]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            if bits_of(dict(value)) == wanted:
                return True
            left += value.values()
        elif isinstance(value, (list, tuple)):
            left += value
    return False


def _loads(holder: Stateful, scheduler: LRScheduler) -> bool:
    """True if a registered object brings a scheduler back as its own state is loaded, as by `last_epoch` alone."""
    kept, groups = dict(vars(scheduler)), scheduler.optimizer.param_groups
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    state = copy.deepcopy(holder.state_dict())
    try:
        scheduler.last_epoch += 1
        holder.load_state_dict(state)
        return bool(scheduler.last_epoch == kept["last_epoch"])
    except Exception:  # noqa: BLE001 - the user's code; the run raises it when it loads the state
        return True
    finally:
        vars(scheduler).update(kept)
        for group, values in zip(groups, settings, strict=True):
            group.update(values)


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


def hook(own: BuiltOptimizer, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Call `before` ahead of all step hooks that there are, and `after` behind them."""
    optimizer = own.optimizer
    handle = optimizer.register_step_pre_hook(before)
    hooks = optimizer._optimizer_step_pre_hooks
    others = {key: hooks.pop(key) for key in list(hooks) if key != handle.id}
    hooks.update(others)
    optimizer.register_step_post_hook(after)
    own.hooks.leave_present()

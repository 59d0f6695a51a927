"""Calls of the step hooks of a task's optimizer: left out or noted in a trial, watched in a run.

A hook sees a worker's shards. A hook that changes gradients by a rule of whole tensors, such as clipping by norm, gives
other bits at every number of workers. A trial before the run finds what hooks do to the optimizer's own groups. Most
hooks reach the model through their closures; `watch` finds what these change, when they change it. A hook that is
registered after the trial may change no parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from raysharded.actors.device.device_waits import numbers_of
from raysharded.actors.model.sharded_model import local_of
from raysharded.actors.numerics.bit_digest import tensor_digest
from raysharded.actors.optimizer.inner_optimizers import OptimizerParts
from raysharded.actors.task_calls.object_contents import NotFollowed
from raysharded.actors.task_calls.remarks import Say
from raysharded.errors import InexactError, TaskError

_STEP = -1
"""Key of the changes that the optimizer's step makes outside its hooks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """This worker's tensors that hooks may change, as functions that return them."""

    gradients: Callable[[], Sequence[torch.Tensor | None]]
    """All places of a gradient."""
    params: Callable[[], Sequence[torch.Tensor]]


class HookCalls(NotFollowed):
    """Wrapper around the step hooks of an optimizer and of all optimizers inside it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parts = OptimizerParts(optimizer)
        self.names: dict[int, str] = {}
        """Description of each hook by key, for errors."""
        self._mode: Literal["left out", "noted", "run"] = "run"
        self._changing: set[int] = set()
        self._watch: _Watch | None = None
        self._late: set[int] = set()
        self._own = frozenset[int]()
        self._wrap()

    def leave_present(self) -> None:
        """Leave the hooks alone that there are now beside the wrapped ones: a session's, between which a step lies.

        Hooks of the outermost optimizer behind its last one are lines behind the step.
        """
        kinds = (self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks)
        self._own = frozenset(key for hooks in kinds for key, hook in hooks.items() if not isinstance(hook, _Call))

    def _wrap(self, *, are_late: bool = False) -> None:
        """Wrap hooks; `are_late`: those that were registered since, which may change no parameter."""
        for part in self._parts.all:
            kinds = ("pre",) if self._own and part is self._optimizer else ("pre", "post")
            for kind in kinds:
                hooks = getattr(part, f"_optimizer_step_{kind}_hooks", {})
                for handle, hook in list(hooks.items()):
                    if are_late and (isinstance(hook, _Call) or handle in self._own):
                        continue
                    key = len(self.names)
                    self.names[key] = f"the step {kind} hook {_name_of(hook)}"
                    hooks[handle] = _Call(self, key, hook)
                    if are_late:
                        self._late.add(key)

    @contextmanager
    def left_out(self) -> Iterator[set[int]]:
        """A context in which no hook is called.

        Yields the key of the step if it changes the gradients of the groups, or nothing.
        """
        with self._as("left out") as changing:
            yield changing

    @contextmanager
    def noted(self) -> Iterator[set[int]]:
        """A context in which hooks are called. Yields the keys of those that change the gradients of the groups."""
        with self._as("noted") as changing:
            yield changing

    @contextmanager
    def _as(self, mode: Literal["left out", "noted"]) -> Iterator[set[int]]:
        self._mode, self._changing = mode, set()
        try:
            yield self._changing
        finally:
            self._mode = "run"

    def stepping(self, step: Callable[[], None]) -> None:
        """Call the optimizer's step in a trial."""
        before = self._of_groups()
        step()
        if self._mode == "left out" and self._of_groups() != before:
            self._changing.add(_STEP)

    def call(self, key: int, hook: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a hook for the optimizer, or skip it in a trial without hooks."""
        match self._mode:
            case "left out":
                return None
            case "noted":
                before = self._of_groups()
                given = hook(*args)
                if self._of_groups() != before:
                    self._changing.add(key)
                return given
            case "run":
                if self._watch is None:
                    return hook(*args)
                with self._watch.around(key):
                    return hook(*args)

    def _of_groups(self) -> list[tuple[int, int] | None]:
        return [_mark(param.grad) for held in self._parts.lists for param in held]

    def watch(self, watched: Watched, elementwise: frozenset[int], say: Say) -> None:
        """Check hooks from now on. `say`: reports a hook that changes parameters.

        A hook that changes gradients is rejected, unless `elementwise` has its key: in a trial it changed each element
        by itself. A hook that changes a learning rate is always rejected.
        """
        self._watch = _Watch(self._optimizer, self._parts, self.names, watched, elementwise, say, self._late)

    def unwatch(self) -> None:
        """Check hooks no longer: the generation is over."""
        self._watch = None

    @contextmanager
    def in_step(self, step: int) -> Iterator[None]:
        """A context around step number `step` of the run. Raises InexactError or TaskError within it."""
        if self._watch is None:
            yield
            return
        self._wrap(are_late=True)
        with self._watch.in_step(step):
            yield


class _Call:
    def __init__(self, calls: HookCalls, key: int, hook: Callable[..., Any]) -> None:
        self.calls, self.key, self.hook = calls, key, hook

    def __call__(self, *args: Any) -> Any:
        return self.calls.call(self.key, self.hook, args)


class _Watch:
    """Comparison of gradients, rates and parameters before and after a step's hooks.

    Bits are compared in the steps 1, 2, 4, 8, .... If a program's hooks write to gradients at all, they are compared in
    every step, since a clipping may reach its limit in any step. torch's version counter shows such writes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: OptimizerParts,
        names: dict[int, str],
        watched: Watched,
        elementwise: frozenset[int],
        say: Say,
        late: set[int],
    ) -> None:
        """`late`: keys of the hooks that were registered after the trial; the set grows."""
        self._optimizer, self._parts, self._names, self._watched = optimizer, parts, names, watched
        self._elementwise, self._say, self._late = elementwise, say, late
        self._step = 0
        steps = [part.step for part in parts.all if "step" in vars(part)]
        self._looks_always = bool(names or steps)
        """True if hooks or patched steps exist: the trial covers a class's step, but not their closures."""
        self._writes: set[int] = set()
        """Keys of the hooks that have written to a gradient."""
        self._named: set[int] = set()

    @contextmanager
    def in_step(self, step: int) -> Iterator[None]:
        self._step = step
        with self.around(_STEP):
            yield

    @contextmanager
    def around(self, key: int) -> Iterator[None]:
        """A context around a hook's call, or around the whole step."""
        due = self._step & (self._step - 1) == 0
        looks_at_params = due and key != _STEP and key not in self._named
        rates = self._rates()
        marks = self._marks(due)
        is_late = key in self._late  # what it does to gradients is compared around the whole step
        bits = self._bits() if (due or key in self._writes) and not is_late else None
        params = _digests(self._watched.params()) if looks_at_params else None
        yield
        if self._rates() != rates:
            raise self._changed_rate(key)
        if not is_late and self._marks(due) != marks:
            self._writes.add(key)
        allowed = self._elementwise & (self._writes if key == _STEP else {key})  # a step includes its hooks
        if bits is not None and not allowed and self._bits() != bits:
            raise self._changed_gradient(key)
        if params is not None and _digests(self._watched.params()) != params:
            if is_late:
                raise self._changed_parameters(key)
            self._named.add(key)
            self._say(
                self._names[key],
                f"{self._who(key)} changes parameters, on each worker its own shards of them: it must treat each "
                "element by itself, and keep state only in optimizer.state[parameter]",
            )

    def _marks(self, due: bool) -> list[tuple[int, int] | None]:
        return [_mark(gradient) for gradient in self._watched.gradients()] if due or self._looks_always else []

    def _bits(self) -> list[object]:
        there = [gradient for gradient in self._watched.gradients() if gradient is not None]
        return [[id(gradient) for gradient in there], _digests(there)]

    def _rates(self) -> list[float]:
        """Learning rates of the groups, without tensors on an accelerator: reading them would block."""
        rates = [group["lr"] for group in self._parts.groups if "lr" in group]
        return [float(rate) for rate in rates if not isinstance(rate, torch.Tensor) or rate.device.type == "cpu"]

    def _who(self, key: int) -> str:
        name = type(self._optimizer).__name__
        return f"{name}.step()" if key == _STEP else f"{self._names[key]} of {name}"

    def _changed_parameters(self, key: int) -> InexactError:
        return InexactError(
            f"{self._who(key)} changed parameters in step {self._step}, and was registered after the optimizer had "
            "been tried: each worker has a part of them, so a rule of whole tensors, such as a norm, would depend on "
            "the number of workers. Register it in build_optimizer."
        )

    def _changed_gradient(self, key: int) -> InexactError:
        return InexactError(
            f"{self._who(key)} changed gradients in step {self._step}: each worker has a part of them, so a rule of "
            "whole tensors, such as clipping by a norm, would depend on the number of workers. Clip by "
            "Task.max_grad_norm; change gradients element by element through optimizer.param_groups, where it can be "
            'tried before the run; or accept results without identical bits with EngineConfig(reduction="fast").'
        )

    def _changed_rate(self, key: int) -> TaskError:
        return TaskError(
            f"{self._who(key)} changed the learning rate of a group in step {self._step}. raysharded sets the rates in "
            "each step, so that they are the same after a loss and a resume: what a scheduler sets is lost. "
            "Give the schedule as Task.lr_scale(step)."
        )


def _mark(tensor: torch.Tensor | None) -> tuple[int, int] | None:
    """Identity of a tensor's contents: it differs for another tensor, and after every write."""
    if tensor is None:
        return None
    return id(tensor), (tensor._local_tensor if isinstance(tensor, DTensor) else tensor)._version


def _digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    return numbers_of(tensor_digest(local_of(tensor)) for tensor in tensors)


def _name_of(hook: object) -> str:
    own = inspect.unwrap(hook) if callable(hook) else hook
    own = getattr(own, "func", own)
    name = getattr(own, "__qualname__", type(own).__qualname__).replace("<locals>.", "")
    code = getattr(getattr(own, "__func__", own), "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name

"""The task's optimizer over this worker's shards, and the check that sharding does not change its bits.

Element-wise optimizers (SGD, AdamW) run on plain local tensors: no DTensor dispatch, and their state has the shards'
shapes. A trial (`trial.py`) finds out whether an optimizer is element-wise, and whether other workers can get its
state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raysharded.actors.model.inventory import Item
from raysharded.actors.model.param_layout import ParamLayout, Replication
from raysharded.actors.model.sharded_model import local_of
from raysharded.actors.optimizer.built_optimizer import BuiltOptimizer
from raysharded.actors.optimizer.held_parameters import AssignedMemory, lost_attributes
from raysharded.actors.optimizer.kept_state import KeptState
from raysharded.actors.optimizer.learning_rate import rate_of, require_rates, scale_of, set_rates
from raysharded.actors.optimizer.loaded_state import (
    LoadedState,
    OptimizerKind,
    TriedOptimizer,
    remark_begun,
    remark_changed,
    remark_left_out,
    remark_unused,
)
from raysharded.actors.optimizer.refusals import cannot_be_kept, depends_on_the_cut
from raysharded.actors.optimizer.step_hooks import Watched
from raysharded.actors.optimizer.trial import Verdict
from raysharded.actors.task_calls.explanations import about_optimizer
from raysharded.actors.task_calls.remarks import Say, say_nothing
from raysharded.actors.task_calls.task_errors import is_collective_failure
from raysharded.errors import CheckpointError, InexactError, TaskError, text_of, user_traceback
from raysharded.overrides import Rates, factor_at
from raysharded.task import Task


class ShardOptimizer:
    """The task's optimizer, run on local shards. Parameters keep their names; frozen ones are not stepped."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        *,
        exact: bool,
        cuts: ParamLayout | None = None,
        rates: Rates = (),
        numbers: int = 2,
        built: BuiltOptimizer | None = None,
    ) -> None:
        """`cuts`: layout of the parameters over the workers; None: each one is cut over all. `rates`: requested factors
        of the learning rate. `numbers`: number of the rule. `built`: the optimizer that an earlier generation built."""
        self.rates, self._numbers = rates, numbers
        self._cuts = cuts or ParamLayout()
        built = built or BuiltOptimizer.of(task, model)
        self.built, self._optimizer, self._parts, self._hooks = built, built.optimizer, built.parts, built.hooks
        self._task, names = task, {id(param): name for name, param in parameters.items()}
        self._keeps: Mapping[str, frozenset[str]] = {}
        self._loaded = LoadedState(self._parts, self._keeps)
        self._say: Say = say_nothing
        self._model_params = list(parameters.values())
        self._exact = exact
        self._params: dict[str, torch.Tensor] = {}
        self._sharded: dict[str, nn.Parameter] = {}
        self._elementwise = exact or self._is_elementwise()
        require_rates(task, self._optimizer, self._parts.groups)
        for group in self._parts.groups:
            group["initial_lr"] = float(group.get("initial_lr", group["lr"]))  # a tensor would be changed with "lr"
        own: dict[str, nn.Parameter] = {}
        for held in self._parts.lists:
            for place, param in enumerate(held):
                name = names.get(id(param))
                if name is None:
                    raise TaskError(
                        f"{type(task).__name__}.build_optimizer was given a parameter of shape {tuple(param.shape)} "
                        "that is not in the model; pass model.parameters() or a part of them."
                    )
                self._sharded[name] = param
                if self._elementwise:
                    held[place] = own.setdefault(name, nn.Parameter(local_of(param), requires_grad=param.requires_grad))
                self._params[name] = held[place]
        missing = [name for name, p in parameters.items() if p.requires_grad and name not in self._params]
        if missing:
            raise TaskError(
                f"{len(missing)} trainable parameters are in no group of the optimizer, first {missing[0]!r}; add them "
                f"in {type(task).__name__}.build_optimizer, or freeze them (requires_grad=False)."
                f"{about_optimizer(self._optimizer)}"
            )
        self.assigned = AssignedMemory(self._params if self._elementwise else {}, self._sharded)
        kind = type(self._optimizer).__name__
        self._kept = KeptState(self._parts, kind, self._params, self._sharded, elementwise=self._elementwise)
        self.kind = built.note({id(param): name for name, param in self._params.items()})

    @property
    def written(self) -> Mapping[str, torch.Tensor]:
        """Tensors that a step of the optimizer changes, by the parameter's name."""
        return self._params

    def group_items(self) -> Iterator[Item]:
        """The groups as they were built, for the comparison with other workers."""
        yield from self.built.items

    def has(self, name: str) -> bool:
        """True if the parameter is in a group of the optimizer."""
        return name in self._params

    def trains(self, name: str) -> bool:
        """True if the optimizer has the parameter and it is not frozen."""
        return name in self._sharded and self._sharded[name].requires_grad

    def gradients(self, *holders: Replication) -> list[torch.Tensor]:
        """The local gradients in a fixed order: all, or those of parameters whose `Replication` is in `holders`."""
        return [
            local_of(param.grad)
            for name, param in self._sharded.items()
            if param.requires_grad and param.grad is not None and (not holders or self._cuts.holders(name) in holders)
        ]

    def clear_gradients(self) -> None:
        """Drop the gradients. Must run before a forward: from forward to backward FSDP2 shows unsharded parameters."""
        for param in self._sharded.values():
            param.grad = None

    @contextmanager
    def keeping_gradients(self) -> Iterator[None]:
        """A context for another backward, after which the current gradients are restored. Nothing is copied."""
        kept = [(param, param.grad) for param in self._sharded.values()]
        try:
            yield
        finally:
            for param, gradient in kept:
                param.grad = gradient

    def apply(self, step: int, scale: float, used: Collection[str] | None = None) -> float:
        """Make one optimizer step with the gradients times `scale`; returns the first group's learning rate.

        `used`: names of the parameters to step; None: all. The others get no gradient. Raises TaskError, before
        anything is changed, if the learning rate of a group is invalid.
        """
        rates = self._rates_of(step)
        with self.stepping(step, scale, rates, used):
            self._step()
        return float(rates[0])

    @contextmanager
    def stepping(self, step: int, scale: float, rates: Sequence[Any], used: Collection[str] | None) -> Iterator[None]:
        """A context for one step of the optimizer, as in `apply`. `rates`: learning rate of each group."""
        for name, param in self._sharded.items():
            if used is not None and name not in used:
                param.grad = self._params[name].grad = None
        gradients = self.gradients()
        if gradients:
            torch._foreach_mul_(gradients, scale)
        set_rates(self._parts.groups, rates)
        if self._elementwise:
            for name, param in self._sharded.items():
                if param.requires_grad and param.grad is not None:
                    self._params[name].grad = local_of(param.grad)
        try:
            with self._hooks.in_step(step):
                yield
            if self._loaded.is_strange:
                stepped = {name: param for name, param in self._params.items() if param.grad is not None}
                remark_unused(type(self._optimizer).__name__, step, self._loaded.leave_out_unused(stepped), self._say)
        except (AttributeError, TypeError) as error:
            without = [name for name, param in self._params.items() if param.requires_grad and param.grad is None]
            if not without:
                raise
            raise _failed_without_gradient(type(self._optimizer).__name__, step, without, error) from error
        self.assigned.take()
        self._optimizer.zero_grad(set_to_none=True)
        self.clear_gradients()

    def _step(self) -> None:
        try:
            self._optimizer.step()
        except RuntimeError as error:
            if self._elementwise or is_collective_failure(error):
                raise
            raise _failed_on_dtensors(type(self._optimizer).__name__, error) from error
        except KeyError as error:
            if not self._loaded.parameters:
                raise
            raise CheckpointError(
                f"{type(self._optimizer).__name__} misses {error} in the state that was saved"
                f"{self._loaded.describe_first()}. Another optimizer seems to have made it. Restore the one that the "
                "run was started with, or give the run another name, and exported weights to start from."
            ) from error

    def lr_of(self, step: int) -> float:
        """The first group's learning rate in a step."""
        return float(self._rates_of(step)[0])

    def _rates_of(self, step: int) -> list[Any]:
        """Learning rate of each group: initial rate times the task's schedule times the requested factor."""
        scale, factor = scale_of(self._task, step), factor_at(self.rates, step)
        return [
            rate_of(self._task, step, group["initial_lr"], scale, factor, number=self._numbers)
            for group in self._parts.groups
        ]

    def state(self) -> dict[str, torch.Tensor]:
        """`<parameter>.<key>` -> local state tensor (numbers: 0-dim), sorted by name; empty before the first step."""
        return self._kept.tensors()

    def load_state(self, values: Mapping[str, torch.Tensor], numbers: frozenset[str]) -> None:
        """Replace the whole state: `values` as from `state()`, `numbers` the names of Python numbers.

        State of another optimizer is left out: at once if it can be recognized, else after the next step. Raises
        CheckpointError for state of a parameter or inner optimizer that does not exist.
        """
        self._loaded = self._kept.load(values, numbers, self._keeps, self._say)

    def number_names(self) -> frozenset[str]:
        """Names in `state()` that stand for Python numbers."""
        return self._kept.number_names()

    def num_tensors(self) -> dict[str, int]:
        """Number of state tensors of each parameter, by name; those of the loaded state that were left out count."""
        return self._kept.num_tensors(self._loaded.num_left_out)

    def step_device(self, full_name: str, device: torch.device) -> torch.device:
        """Device of a 0-dim state tensor: the CPU, unless the optimizer is fused or capturable.

        State of a scalar parameter, except its step count, is on the parameter's device, as in torch's
        `load_state_dict`.
        """
        name, _, key = full_name.rpartition(".")
        if key != "step" and name in self._params and not self._params[name].dim():
            return device
        for group in self._parts.groups:
            if any(param is self._params[name] for param in group["params"]):
                return device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        return device

    def try_out(self, before: TriedOptimizer | None = None, say: Say = say_nothing) -> TriedOptimizer:
        """Try the optimizer, before the state is loaded: the model's parameters may be overwritten.

        `before`: an earlier result in this process, reused if the optimizer is of the same kind. `say`: reports
        possible mistakes: parameters that hooks change in a run, and loaded state that is not used.

        Raises `InexactError` if the optimizer keeps state that other workers cannot get. In exact mode it also raises
        this if cutting a tensor changes the optimizer's bits. Raises TaskError if the step cannot be tried.
        """
        tried = before if before is not None and before.kind == self.kind else self._tried_anew()
        self._say, self._keeps, found = say, tried.keeps, tried.verdict
        if found.kept is not None:
            raise InexactError(cannot_be_kept(self._optimizer, found.kept))
        if self._exact:
            if found.cut is not None:
                raise InexactError(depends_on_the_cut(self._optimizer, found.cut))
            watched = Watched(
                gradients=lambda: [param.grad for of in (self._sharded, self._params) for param in of.values()],
                params=lambda: list(self._params.values()),
            )
            self._hooks.watch(watched, found.elementwise, say)
        return tried

    def _tried_anew(self) -> TriedOptimizer:
        verdict = self._tried()
        keeps = {name: verdict.keeps[id(p)] for name, p in self._params.items() if id(p) in verdict.keeps}
        return TriedOptimizer(kind=self.kind, verdict=verdict, keeps=keeps)

    def remark_changes(self, left_out: Collection[str], before: OptimizerKind | None) -> None:
        """Report changes since the loaded state was made.

        `left_out`: the parameters whose state was left out. `before`: the optimizer of the previous generation; None if
        the state comes from a checkpoint.
        """
        remark_left_out(left_out, self._say)
        if before is None:
            remark_begun(self._loaded.begun(sorted(self.kind.trained)), self._say)
        else:
            remark_changed(before, self.kind, self._say)

    def _tried(self) -> Verdict:
        without = [*self._model_params, *self._params.values()]
        return self.built.tried(without, lost_attributes(self._params, self._sharded))

    def _is_elementwise(self) -> bool:
        try:
            return self._tried().cut is None
        except TaskError:  # on plain tensors; DTensors may work
            return False


def _failed_on_dtensors(kind: str, error: RuntimeError) -> TaskError:
    return TaskError(
        f"{kind}.step() failed on parameters that are spread over the workers: {text_of(error)} In fast mode an "
        "optimizer that is not element-wise steps on torch's DTensors: use one whose operations they have, as Muon's, "
        "or SGD, Adam or AdamW.",
        user_traceback(error),
    )


def _failed_without_gradient(kind: str, step: int, without: Sequence[str], error: Exception) -> TaskError:
    return TaskError(
        f"{kind}.step raised {type(error).__name__}: {text_of(error)}. It has {len(without)} parameters without "
        f"gradient, as no microbatch of step {step} used them, first {without[0]!r}: their grad is None, as in plain "
        "torch. Let the optimizer skip such parameters.",
        user_traceback(error),
    )

"""The task's optimizer over this worker's own shards, and the check that sharding cannot change its bits.

Element-wise optimizers (SGD, AdamW) run on plain local tensors: no DTensor dispatch, and their state has the shards'
shapes. Whether one is element-wise, and keeps what it remembers where it can be handed on, is tried (`trial.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from raysharded.actors.build import local_of
from raysharded.actors.cuts import Cuts, Holders
from raysharded.actors.learning_rate import rate_of, scale_of
from raysharded.actors.trial import is_elementwise, not_handed_on
from raysharded.errors import CheckpointError, InexactError, TaskError, text_of, user_traceback
from raysharded.rates import Rates, factor_at
from raysharded.task import Task


class ShardOptimizer:
    """Runs the task's optimizer on local shards. Parameters keep their names; frozen ones are left out."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        *,
        exact: bool,
        cuts: Cuts | None = None,
        rates: Rates = (),
        numbers: int = 2,
    ) -> None:
        """`cuts`: how the parameters lie over the workers; None: every one is cut over all of them. `rates`: factors
        of its learning rates that somebody asked for. `numbers`: the number of the rule."""
        self._rates, self._numbers = rates, numbers
        self._cuts = cuts or Cuts()
        self._optimizer = task.build_optimizer(model)
        self._task = task
        names = {id(param): name for name, param in parameters.items()}
        self._is_loaded = False
        """Its state was, and no step has been done with it yet."""
        self._elementwise = exact or is_elementwise(self._optimizer)
        self._params: dict[str, torch.Tensor] = {}
        self._sharded: dict[str, nn.Parameter] = {}
        for group in self._optimizer.param_groups:
            group["initial_lr"] = float(group.get("initial_lr", group["lr"]))  # a tensor would be changed with "lr"
            for place, param in enumerate(group["params"]):
                name = names.get(id(param))
                if name is None:
                    raise TaskError(
                        f"{type(task).__name__}.build_optimizer was given a parameter of shape {tuple(param.shape)} "
                        "that is not in the model; pass model.parameters() or a part of them."
                    )
                self._sharded[name] = param
                if self._elementwise:
                    group["params"][place] = nn.Parameter(local_of(param), requires_grad=param.requires_grad)
                self._params[name] = group["params"][place]
        missing = [name for name, p in parameters.items() if p.requires_grad and name not in self._params]
        if missing:
            raise TaskError(
                f"{len(missing)} trainable parameters are in no group of the optimizer, first {missing[0]!r}; add them "
                f"in {type(task).__name__}.build_optimizer, or freeze them (requires_grad=False)."
            )

    @property
    def written(self) -> Mapping[str, torch.Tensor]:
        """The tensors that a step of the optimizer changes, by the parameter's name."""
        return self._params

    def trains(self, name: str) -> bool:
        """True for a parameter that it has and that is not frozen."""
        return name in self._sharded and self._sharded[name].requires_grad

    def gradients(self, *holders: Holders) -> list[torch.Tensor]:
        """The local gradients, in a fixed order; those whose parts are held like this, or all."""
        return [
            local_of(param.grad)
            for name, param in self._sharded.items()
            if param.requires_grad and param.grad is not None and (not holders or self._cuts.holders(name) in holders)
        ]

    def clear_gradients(self) -> None:
        """Forget gradients; must run before a forward: from forward to backward FSDP2 shows unsharded parameters."""
        for param in self._sharded.values():
            param.grad = None

    def apply(self, step: int, scale: float, used: Collection[str] | None = None) -> float:
        """One optimizer step with the gradients times `scale`; returns the first group's learning rate.

        `used`: the parameters that it is for, by name; the others have no gradient in it. None: all. Raises TaskError,
        before anything is changed, if the learning rate of a group is none.
        """
        rates = self._rates_of(step)
        for name, param in self._sharded.items():
            if used is not None and name not in used:
                param.grad = None
        gradients = self.gradients()
        if gradients:
            torch._foreach_mul_(gradients, scale)
        for group, lr in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if self._elementwise:
            for name, param in self._sharded.items():
                if param.requires_grad and param.grad is not None:
                    self._params[name].grad = local_of(param.grad)
        try:
            self._step()
        except (AttributeError, TypeError) as error:
            without = [name for name, param in self._params.items() if param.requires_grad and param.grad is None]
            if not without:
                raise
            raise TaskError(
                f"{type(self._optimizer).__name__}.step raised {type(error).__name__}: {text_of(error)}. Of its "
                f"parameters {len(without)} have no gradient, as no microbatch of step {step} used them, first "
                f"{without[0]!r}: their grad is None, as in plain torch, and an optimizer passes over them.",
                user_traceback(error),
            ) from error
        self._optimizer.zero_grad(set_to_none=True)
        self.clear_gradients()
        return float(rates[0])

    def _step(self) -> None:
        try:
            self._optimizer.step()
        except KeyError as error:
            if not self._is_loaded:
                raise
            raise CheckpointError(
                f"{type(self._optimizer).__name__} misses {error} in the state that was saved: another optimizer seems "
                "to have made it. Restore the one that the run was started with, or give the run another name."
            ) from error
        self._is_loaded = False

    def lr_of(self, step: int) -> float:
        """The first group's learning rate in a step."""
        return float(self._rates_of(step)[0])

    def _rates_of(self, step: int) -> list[Any]:
        """Each group's own, times the task's schedule, times what somebody asked for."""
        scale, factor = scale_of(self._task, step), factor_at(self._rates, step)
        return [
            rate_of(self._task, step, group["initial_lr"], scale, factor, number=self._numbers)
            for group in self._optimizer.param_groups
        ]

    def state(self) -> dict[str, torch.Tensor]:
        """`<parameter>.<key>` -> local state tensor (numbers: 0-dim), sorted by name; empty before the first step."""
        found: dict[str, torch.Tensor] = {}
        for name, param in self._params.items():
            for key, value in self._optimizer.state.get(param, {}).items():
                if value is None:
                    continue
                if isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor)):
                    raise InexactError(
                        f"the optimizer keeps {key!r} of {name!r} as a {type(value).__name__}; only tensors and "
                        "numbers can be resharded."
                    )
                found[f"{name}.{key}"] = self._as_tensor(name, key, value)
        return dict(sorted(found.items()))

    def _as_tensor(self, name: str, key: str, value: float | torch.Tensor) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
        local = local_of(value)
        if local.dim() and local.shape != local_of(self._params[name]).shape:
            raise InexactError(
                f"the optimizer keeps {key!r} of {name!r} in the shape {tuple(local.shape)}, its parameter's shard has "
                f"{tuple(local_of(self._params[name]).shape)}: it is not element-wise and cannot be resharded. Use "
                "SGD, Adam or AdamW."
            )
        return local

    def load_state(self, values: Mapping[str, torch.Tensor], numbers: frozenset[str]) -> None:
        """Replace the whole state; `values` as `state()` gives them, `numbers` the names that are Python numbers.

        Raises CheckpointError if it is of a parameter that the optimizer does not have.
        """
        self._optimizer.state.clear()
        self._is_loaded = bool(values)
        for full_name, value in values.items():
            name, _, key = full_name.rpartition(".")
            if name not in self._params:
                raise CheckpointError(
                    f"the saved state has {key!r} of {name!r}, which is in no group of this "
                    f"{type(self._optimizer).__name__}. Give it the parameters that the run was started with, or give "
                    "the run another name."
                )
            entry = self._optimizer.state.setdefault(self._params[name], {})
            if full_name in numbers:
                entry[key] = value.item()
            else:
                sharded = self._sharded[name]
                entry[key] = value if self._elementwise or not value.dim() else _like_dtensor(value, sharded)

    def number_names(self) -> frozenset[str]:
        """The names in `state()` that stand for Python numbers."""
        return frozenset(
            f"{name}.{key}"
            for name, param in self._params.items()
            for key, value in self._optimizer.state.get(param, {}).items()
            if isinstance(value, (int, float))
        )

    def step_device(self, full_name: str, device: torch.device) -> torch.device:
        """Where a 0-dim state tensor of this optimizer lives: on the CPU unless it runs fused or capturable."""
        name, _, _ = full_name.rpartition(".")
        for group in self._optimizer.param_groups:
            if any(param is self._params[name] for param in group["params"]):
                return device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        return device

    def check_state(self) -> None:
        """Raise `InexactError` if this optimizer remembers what cannot be handed on; takes milliseconds."""
        found = not_handed_on(self._optimizer)
        if found:
            raise InexactError(
                f"{type(self._optimizer).__name__} {found}: a worker that joins, or takes another's place, would not "
                "have it. Let it keep what it remembers in optimizer.state[parameter], as tensors or numbers, from its "
                "first step on."
            )

    def num_tensors(self) -> dict[str, int]:
        """Of the state that the optimizer keeps of each parameter, by name."""
        return {name: len(self._optimizer.state.get(param, ())) for name, param in self._params.items()}

    def check_elementwise(self) -> None:
        """Raise `InexactError` if cutting a tensor changes the bits this optimizer gives; takes milliseconds."""
        if not is_elementwise(self._optimizer):
            settings = {k: v for k, v in self._optimizer.defaults.items() if k in ("foreach", "fused")}
            raise InexactError(
                f"{type(self._optimizer).__name__} with {settings} gives other bits on a shard than on the whole "
                "tensor, so the number of workers would show in the weights. Pass foreach=True, fused=False to it "
                "(and keep its state in float32), or "
                'give up identical bits with EngineConfig(reduction="fast").'
            )


def _like_dtensor(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    assert isinstance(param, DTensor)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )

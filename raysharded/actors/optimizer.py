"""The task's optimizer over this worker's own shards, and the check that sharding cannot change its bits.

Element-wise optimizers (SGD, AdamW) run on plain local tensors: no DTensor dispatch, and their state has the shards'
shapes. Some kernels round differently in their vector tails, where a shard's end falls; `check_elementwise` tries
the optimizer once, on shards of odd lengths against the whole.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from raysharded.actors.bits import tensor_digest
from raysharded.actors.build import local_of
from raysharded.actors.cuts import Cuts, Holders
from raysharded.errors import CheckpointError, InexactError, TaskError
from raysharded.rates import Rates, factor_at
from raysharded.task import Task

_PROBE_LENGTH = 4099
_PROBE_WIDTH = 3
_PROBE_CUTS = (0, 1, 14, 45, 300, 1369, 2740, 2741, 4099)
_PROBE_STEPS = 8
_OF_TORCH = frozenset(
    ("state", "param_groups", "defaults", "_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused")
)
"""Attributes of torch's optimizers that say nothing of what they remember."""


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
    ) -> None:
        """`cuts`: how the parameters lie over the workers; None: every one is cut over all of them. `rates`: factors
        of its learning rates that somebody asked for."""
        self._rates = rates
        self._cuts = cuts or Cuts()
        self._optimizer = task.build_optimizer(model)
        self._task = task
        names = {id(param): name for name, param in parameters.items()}
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

    def apply(self, step: int, scale: float) -> float:
        """One optimizer step with the gradients times `scale`; returns the first group's learning rate."""
        gradients = self.gradients()
        if gradients:
            torch._foreach_mul_(gradients, scale)
        for group in self._optimizer.param_groups:
            lr = self._lr_of(group, step)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if self._elementwise:
            for name, param in self._sharded.items():
                if param.requires_grad and param.grad is not None:
                    self._params[name].grad = local_of(param.grad)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.clear_gradients()
        return self.lr_of(step)

    def lr_of(self, step: int) -> float:
        """The first group's learning rate in a step."""
        return float(self._lr_of(self._optimizer.param_groups[0], step))

    def _lr_of(self, group: Mapping[str, Any], step: int) -> Any:
        """The optimizer's own, times the task's schedule, times what somebody asked for."""
        return group["initial_lr"] * self._task.lr_scale(step) * factor_at(self._rates, step)

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

        Raises CheckpointError if another optimizer has made it.
        """
        self._check_same_optimizer(values)
        self._optimizer.state.clear()
        for full_name, value in values.items():
            name, _, key = full_name.rpartition(".")
            entry = self._optimizer.state.setdefault(self._params[name], {})
            if full_name in numbers:
                entry[key] = value.item()
            else:
                sharded = self._sharded[name]
                entry[key] = value if self._elementwise or not value.dim() else _like_dtensor(value, sharded)

    def _check_same_optimizer(self, full_names: Iterable[str]) -> None:
        saved: dict[str, set[str]] = defaultdict(set)
        for full_name in full_names:
            name, _, key = full_name.rpartition(".")
            saved[name].add(key)
        for settings, shape, params in _to_try(self._optimizer):
            made = _Trial(self._optimizer, settings, shape, params[0]).keys_after_a_step()
            tried = {id(param) for param in params}
            for name, keys in saved.items():
                own = self._params.get(name)
                if own is None or (id(own) in tried and keys != made):
                    has = "is in no group of" if own is None else f"should have {sorted(made)} in"
                    raise CheckpointError(
                        f"the saved state is of another optimizer: it has {sorted(keys)} of {name!r}, which {has} this "
                        f"{type(self._optimizer).__name__}. Restore the optimizer that the run was started with, or "
                        "give the run another name."
                    )

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
        found = _not_handed_on(self._optimizer)
        if found:
            raise InexactError(
                f"{type(self._optimizer).__name__} {found}: a worker that joins, or takes another's place, would not "
                "have it. Let it keep what it remembers in optimizer.state[parameter], as tensors or numbers, from its "
                "first step on."
            )

    def num_tensors(self) -> int:
        """Of the state that the optimizer keeps."""
        return sum(len(self._optimizer.state.get(param, ())) for param in self._params.values())

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


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps on shards of odd lengths give the bits of steps on the whole, for every group's settings."""
    return all(
        _same_on_shards(optimizer, settings, shape, params[0].dtype, params[0].device)
        for settings, shape, params in _to_try(optimizer)
    )


def _to_try(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], tuple[int, ...], list[torch.Tensor]]]:
    """(settings of groups, a shape, the parameters that it stands for): those are alike for the optimizer."""
    found: list[tuple[dict[str, Any], tuple[int, ...], list[torch.Tensor]]] = []
    places: dict[object, int] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        shown = tuple(sorted((key, repr(value)) for key, value in settings.items()))
        for param in group["params"]:
            shape = (_PROBE_LENGTH, *[_PROBE_WIDTH] * min(param.dim() - 1, 3))  # matrices may have rules of their own
            place = places.setdefault((shape, param.dtype, param.device, shown), len(found))
            if place == len(found):
                found.append((settings, shape, []))
            found[place][2].append(param)
    return found


class _Trial:
    """A twin of an optimizer, on a parameter like one of its own."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: dict[str, Any], shape: tuple[int, ...], like: torch.Tensor
    ) -> None:
        self._param = nn.Parameter(torch.ones(shape, dtype=like.dtype, device=like.device))
        self.twin = with_params(optimizer, settings, [self._param])

    def keys_after_a_step(self) -> set[str]:
        """Of the state that the twin has of its parameter after one more step."""
        self._param.grad = torch.ones_like(self._param)
        self.twin.step()
        return {key for key, value in self.twin.state.get(self._param, {}).items() if value is not None}


def _same_on_shards(
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    start = draw()
    cuts = list(pairwise(_PROBE_CUTS))
    whole = [nn.Parameter(start.clone())]
    parts = [nn.Parameter(start[a:b].clone()) for a, b in cuts]
    of_whole, of_parts = (with_params(optimizer, settings, params) for params in (whole, parts))
    for _ in range(_PROBE_STEPS):
        gradient = draw()
        whole[0].grad = gradient.clone()
        for part, (a, b) in zip(parts, cuts, strict=True):
            part.grad = gradient[a:b].clone()
        of_whole.step()
        of_parts.step()
    return torch.equal(whole[0].detach(), torch.cat([part.detach() for part in parts]))


def with_params(
    optimizer: torch.optim.Optimizer, settings: dict[str, Any], params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """The same optimizer over other parameters, without knowing its constructor. It has attributes of its own."""
    twin = copy.copy(optimizer)
    vars(twin).update(copy.deepcopy(_attributes(optimizer)))
    twin.state = defaultdict(dict)
    twin.param_groups = [{**copy.deepcopy(settings), "params": params}]
    return twin


def _not_handed_on(optimizer: torch.optim.Optimizer) -> str:
    """What it does that no other worker would learn of, in words; empty if it does nothing of the kind."""
    for settings, shape, params in _to_try(optimizer):
        trial = _Trial(optimizer, settings, shape, params[0])
        before = _remembered(trial.twin)
        keys = [trial.keys_after_a_step() for _ in range(_PROBE_STEPS)]
        changed = sorted(name for name, value in _remembered(trial.twin).items() if before.get(name) != value)
        if changed:
            return f"changes {changed[0]} in its steps"
        late = sorted(keys[-1] ^ keys[0])
        if late:
            return f"makes {late[0]!r} of its state after its first step"
    return ""


def _remembered(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """What an optimizer of one group keeps beside the state of its parameters, as far as it is plain: name -> bits."""
    group = {f"{key!r} of its groups": value for key, value in optimizer.param_groups[0].items() if key != "params"}
    state = {f"state[{key!r}]": value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    found = {**group, **state, **{f"self.{name}": value for name, value in _attributes(optimizer).items()}}
    return {name: _bits(value) for name, value in found.items() if _is_plain(value)}


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's own, as far as they are plain."""
    return {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH and _is_plain(value)}


def _is_plain(value: object) -> bool:
    """Numbers, text and tensors, and what is made of them."""
    match value:
        case dict():
            return all(_is_plain(one) for one in value.values())
        case list() | tuple():
            return all(_is_plain(one) for one in value)
        case _:
            return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


def _bits(value: object) -> object:
    """Equal for equal values, to the bit."""
    match value:
        case torch.Tensor():
            return value.dtype, tuple(value.shape), int(tensor_digest(value).item())
        case dict():
            return [(repr(key), _bits(one)) for key, one in value.items()]
        case list() | tuple():
            return [_bits(one) for one in value]
        case _:
            return repr(value)


def _like_dtensor(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    assert isinstance(param, DTensor)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )

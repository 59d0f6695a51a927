"""An optimizer's per-parameter state as tensors by name: read for a snapshot, or replaced by another state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from raysharded.actors.model.sharded_model import local_of
from raysharded.actors.optimizer.inner_optimizers import OptimizerParts
from raysharded.actors.optimizer.loaded_state import LoadedState, is_registered, not_registered, remark_others
from raysharded.actors.task_calls.remarks import Say
from raysharded.errors import CheckpointError, InexactError


class KeptState:
    """State of a `ShardOptimizer` for its parameters."""

    def __init__(
        self,
        parts: OptimizerParts,
        kind: str,
        params: Mapping[str, torch.Tensor],
        sharded: Mapping[str, nn.Parameter],
        *,
        elementwise: bool,
    ) -> None:
        """`kind`: the optimizer's class, for errors. `params`: the parameters that it steps. `sharded`: the model's
        parameters of the same names. `elementwise`: True if it steps local shards, not DTensors."""
        self._parts, self._kind, self._params, self._sharded = parts, kind, params, sharded
        self._elementwise = elementwise

    def tensors(self) -> dict[str, torch.Tensor]:
        """`<parameter>.<key>` -> local state tensor (numbers: 0-dim), sorted by name; empty before the first step."""
        found: dict[str, torch.Tensor] = {}
        for name, param in self._params.items():
            for key, value in self._parts.kept_of(param).items():
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

    def load(
        self,
        values: Mapping[str, torch.Tensor],
        numbers: frozenset[str],
        keeps: Mapping[str, frozenset[str]],
        say: Say,
    ) -> LoadedState:
        """Replace the whole state, as `ShardOptimizer.load_state` does. Raises CheckpointError.

        `keeps`: the state keys that the optimizer makes for each parameter.
        """
        self._parts.forget()
        loaded = LoadedState(self._parts, keeps)
        others = loaded.of_others(values)
        remark_others(self._kind, others, say)
        for full_name, value in values.items():
            name, _, key = full_name.rpartition(".")
            if name in others and not is_registered(key):
                continue
            if name not in self._params:
                raise CheckpointError(
                    f"the saved state has {key!r} of {name!r}, which is in no group of this "
                    f"{self._kind}. Give it the parameters that the run was started with, or give "
                    "the run another name."
                )
            kept: torch.Tensor | float = value.item() if full_name in numbers else value
            if isinstance(kept, torch.Tensor) and kept.dim() and not self._elementwise:
                kept = _like_dtensor(kept, self._sharded[name])
            try:
                self._parts.keep(self._params[name], key, kept)
            except KeyError:
                if is_registered(key):
                    raise CheckpointError(not_registered(key)) from None
                raise CheckpointError(
                    f"the saved state has {key!r} of {name!r}, and this {self._kind} holds no such "
                    "optimizer. Restore the one that the run was started with, or give the run another name."
                ) from None
            loaded.note(name, key, self._parts.kept_of(self._params[name])[key])
        return loaded

    def number_names(self) -> frozenset[str]:
        """Names in `state()` that stand for Python numbers."""
        return frozenset(
            f"{name}.{key}"
            for name, param in self._params.items()
            for key, value in self._parts.kept_of(param).items()
            if isinstance(value, (int, float))
        )

    def num_tensors(self, left_out: Mapping[str, int]) -> dict[str, int]:
        """Number of state tensors of each parameter, by the parameter's name. `left_out`: numbers to be added."""
        kept = self._parts.kept_of
        return {name: len(kept(param)) + left_out.get(name, 0) for name, param in self._params.items()}


def _like_dtensor(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    assert isinstance(param, DTensor)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )

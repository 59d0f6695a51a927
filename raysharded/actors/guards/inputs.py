"""Detection of inputs other than activations that mixed precision rounds: time steps, positions, 1-D tables.

FSDP2 casts the floating-point inputs of each unit to `param_dtype`, which is right for pixels and activations. But in
bfloat16 a time step of 914 arrives as 912. The inputs of a run's first step are checked just before the cast.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from raysharded.actors.in_place.unit_hooks import UnitHooks
from raysharded.actors.model.build import DTYPES, casts_inputs
from raysharded.actors.task_calls.remarks import Say
from raysharded.config import EngineConfig
from raysharded.data.sources import vocabulary


def vocabulary_remark(data: Any, model: nn.Module) -> str:
    """Sentence on a model that has no embedding for some tokens of its data; empty if it has, or is unknown."""
    size = vocabulary(data)
    rows = max((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=0)
    if size is None or not 0 < rows < size:
        return ""
    return (
        f"the vocabulary of the data has {size} tokens, and the model's largest embedding {rows} rows: a token from "
        f"{rows} on would raise IndexError. Give the model {size} rows, or the data the model's tokenizer."
    )


class InputWatch:
    """Watch of the inputs of one generation's model, from construction to `end`. Training thread only."""

    def __init__(self, hooks: Sequence[tuple[str, UnitHooks]], config: EngineConfig, say: Say) -> None:
        """`hooks`: the units', with their names; the root's is empty."""
        self._say = say
        self._placed = []
        for name, each in hooks:
            if config.param_dtype is not None and casts_inputs(config, is_root=not name):
                look = partial(self._look, is_root=not name, dtype=DTYPES[str(config.param_dtype)])
                self._placed.append(each.before_gather(look))

    def end(self) -> None:
        """Stop checking inputs."""
        for placed in self._placed:
            placed.remove()
        self._placed.clear()

    def _look(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_root: bool, dtype: torch.dtype
    ) -> None:
        inner = _user_module(module)
        for name, argument in arguments(inner.forward, args, kwargs).items():
            for path, value in tensors_in(name, argument):
                found = rounded(value, dtype)
                if found is not None:
                    owner = _class_name(inner)
                    self._say(f"cast of {owner} {path}", _sentence(owner, path, value, found, dtype, is_root=is_root))


def rounded(value: torch.Tensor, dtype: torch.dtype) -> tuple[float, float] | None:
    """(before, after) of the first element that a cast changes; None if none changes or if a cast is harmless.

    A cast is harmless for an activation, and for a tensor that neither is one-dimensional nor has only whole numbers.
    """
    if not value.is_floating_point() or value.dtype == dtype or value.requires_grad or value.is_meta:
        return None
    flat = value.detach().reshape(-1)
    cast = flat.to(dtype).to(flat.dtype)
    changed = ((cast != flat) & flat.isfinite()).nonzero()
    if not len(changed) or (value.dim() != 1 and not bool((flat == flat.round()).all())):
        return None
    first = int(changed[0])
    return float(flat[first]), float(cast[first])


def _sentence(
    owner: str, path: str, value: torch.Tensor, found: tuple[float, float], dtype: torch.dtype, *, is_root: bool
) -> str:
    before, after = found
    name = str(dtype).removeprefix("torch.")
    out, whose = ('"units"', "the model") if is_root else ('"none"', "its units")
    return (
        f"{owner}.forward gets {path!r}, of shape {tuple(value.shape)}, rounded to {name}, as param_dtype casts all "
        f"floating-point inputs: {before:.9g} arrives as {after:.9g}. If that is no activation, pass it as integers, "
        f"or set EngineConfig(cast_inputs={out}), which leaves the inputs of {whose} as they are."
    )


def _user_module(module: nn.Module) -> nn.Module:
    """The user's module inside a checkpoint wrapper, or the module itself."""
    inner = module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else module
    assert isinstance(inner, nn.Module)
    return inner


def _class_name(module: nn.Module) -> str:
    return type(module).__name__


def arguments(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the signature."""
    try:
        return dict(inspect.signature(forward).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # the call will fail, or it has no signature
        return {**{f"argument {place}": value for place, value in enumerate(args)}, **kwargs}


def tensors_in(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of each tensor in a value that FSDP2 casts."""
    match value:
        case torch.Tensor():
            yield path, value
        case dict():
            for key, item in value.items():
                yield from tensors_in(f"{path}[{key!r}]", item)
        case list() | tuple():
            for place, item in enumerate(value):
                yield from tensors_in(f"{path}[{place}]", item)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for each in dataclasses.fields(value):
                yield from tensors_in(f"{path}.{each.name}", getattr(value, each.name))

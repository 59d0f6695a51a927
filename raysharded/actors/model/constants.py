"""The constants of a model: values that a constructor leaves on modules outside parameters and persistent buffers.

Constants are tensors, NumPy arrays and numbers, wherever the model's modules hold them, and non-persistent buffers.
Another build cannot reproduce drawn constants. They come from the build that gave the first weights, and are part of
the state from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from raysharded.actors.task_calls.object_contents import reachable
from raysharded.errors import TaskError
from raysharded.task import Task

MOST_BYTES = 256 << 20
"""Largest size of all drawn constants together: every worker and every checkpoint keeps them whole."""
_MOST_OBJECTS = 500_000
_DTYPES: Mapping[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
_INT64 = torch.iinfo(torch.int64)
_OF_MODULES = frozenset(vars(nn.Module()))
_ARRAYS = "?bhilqBefd"
"""Characters of the NumPy dtypes that torch has."""

Write: TypeAlias = Callable[[torch.Tensor], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """One constant of a model."""

    value: torch.Tensor
    write: Write | None
    """Replaces the value in place by one of the same dtype and shape; None if that is impossible."""
    is_number: bool = False
    """True for a number, or a list or tuple of numbers."""


Constants: TypeAlias = Mapping[str, Constant]
"""Path from the model -> constant; a path is, for example, `blocks.0.tables['low'][1]`."""


def constants_of(model: nn.Module, *, with_numbers: bool = False) -> dict[str, Constant]:
    """The constants of a model that is not wrapped yet, each under one of its shortest paths.

    Excludes parameters and persistent buffers, wherever they are kept. Also excludes tensors that a hook computes from
    parameters before each forward, as torch's weight norm does.
    """
    of_state = {id(param) for param in model.parameters()} | {id(buffer) for buffer in _persistent(model)}
    of_state |= {id(tensor) for tensor in _computed_by_hooks(model)}
    found: dict[str, Constant] = {}
    for way, one in reachable(model, most=_MOST_OBJECTS):
        path = way.lstrip(".")
        if isinstance(one, torch.Tensor):
            if id(one) not in of_state:
                found[path] = Constant(value=one.detach(), write=functools.partial(_fill, one))
        elif isinstance(one, np.ndarray):
            if one.dtype.char in _ARRAYS:
                fill: Write = functools.partial(_fill_array, one)
                write = fill if one.flags.writeable else None
                found[path] = Constant(value=torch.from_numpy(np.array(one)), write=write)
        elif with_numbers:
            for step, value, put in _numbers_in(one):
                found[f"{path}{step}".lstrip(".")] = Constant(value=value, write=put, is_number=True)
    return found


def _persistent(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


def _computed_by_hooks(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if module._forward_pre_hooks:
            for value in vars(module).values():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    yield value


def _fill(into: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        into.copy_(value)


def _fill_array(into: np.ndarray[Any, Any], value: torch.Tensor) -> None:
    np.copyto(into, value.numpy())


def _numbers_in(holder: object) -> Iterator[tuple[str, torch.Tensor, Write | None]]:
    """Numbers that an object holds directly: the path step to each, its value, and its writer."""
    if isinstance(holder, list):
        numbers = _as_tensor(holder)
        if numbers is not None:
            yield "", numbers, lambda tensor: _put_all(holder, tensor)
        else:
            yield from _entries(enumerate(holder), holder.__setitem__, "[{!r}]")
    elif isinstance(holder, dict):
        yield from _entries(holder.items(), holder.__setitem__, "[{!r}]")
    elif isinstance(holder, nn.Module):
        own = ((name, value) for name, value in vars(holder).items() if name not in _OF_MODULES)
        yield from _entries(own, vars(holder).__setitem__, ".{}")
    elif hasattr(holder, "__dict__") and not callable(holder):
        yield from _entries(vars(holder).items(), vars(holder).__setitem__, ".{}")


def _entries(
    entries: Iterable[tuple[Any, Any]], put: Callable[[Any, Any], None], step: str
) -> Iterator[tuple[str, torch.Tensor, Write | None]]:
    for key, value in list(entries):
        numbers = None if isinstance(value, list) else _as_tensor(value)  # a list is visited as an object itself
        if numbers is not None:
            kind = tuple if isinstance(value, tuple) else None
            yield step.format(key), numbers, functools.partial(_put, put, key, kind)


def _put(put: Callable[[Any, Any], None], key: Any, kind: type | None, value: torch.Tensor) -> None:
    put(key, value.item() if kind is None else kind(value.tolist()))


def _put_all(into: list[Any], value: torch.Tensor) -> None:
    into[:] = value.tolist()


def _as_tensor(value: Any) -> torch.Tensor | None:
    """A number, or a list or tuple of numbers of one type, as an exact tensor; None for other values."""
    many = value if type(value) in (list, tuple) else (value,)
    kinds = {type(one) for one in many}
    if len(kinds) != 1 or not kinds <= _DTYPES.keys():
        return None
    (kind,) = kinds
    if kind is int and not all(_INT64.min <= one <= _INT64.max for one in many):
        return None
    return torch.tensor(value, dtype=_DTYPES[kind])


def refuse_without_memory(task: Task, constants: Constants) -> None:
    """Raise TaskError for the first constant without values."""
    for path, constant in constants.items():
        if constant.value.is_meta:
            raise TaskError(
                f"{path!r} of the model is a tensor that has no values: it was made of parameters, which have none "
                f"while {type(task).__name__}.build_model runs, and is neither a parameter nor a buffer of the model. "
                "Compute it in forward, or register it as a buffer; if it is a parameter of a module, register that "
                "module."
            )


def differing(first: Constants, here: Constants) -> dict[str, torch.Tensor]:
    """Path -> the value in `first`, for the constants that differ `here`."""
    return {
        path: one.value for path, one in first.items() if path in here and not _is_same(one.value, here[path].value)
    }


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors are equal, NaN included, or cannot be compared."""
    if a is b or a.is_meta or b.is_meta or a.layout is not torch.strided or b.layout is not torch.strided:
        return True
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def check_movable(task: Task, drawn: Mapping[str, torch.Tensor], here: Constants) -> None:
    """Raise TaskError for drawn constants that cannot be written to this worker's model."""
    name = f"{type(task).__name__}.build_model"
    for path, value in drawn.items():
        into = here[path]
        if into.write is None or (value.dtype, value.shape) != (into.value.dtype, into.value.shape):
            raise TaskError(
                f"{path!r} of the model is another one each time that {name} is called, and raysharded cannot put the "
                "first one in the place of later ones: it cannot be written to, or has another shape or dtype each "
                "time. Register it as a buffer, or draw it from a separate generator with a fixed seed."
            )
    sizes = {path: value.numel() * value.element_size() for path, value in drawn.items()}
    if sum(sizes.values()) > MOST_BYTES:
        raise TaskError(
            f"{name} draws {sum(sizes.values()) >> 20} MiB of constants outside parameters and buffers, and raysharded "
            f"hands on up to {MOST_BYTES >> 20} MiB of such (largest: {max(sizes, key=sizes.__getitem__)!r}). "
            "Register it as a persistent buffer, or draw it from a separate generator with a fixed seed."
        )

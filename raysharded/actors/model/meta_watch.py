"""Detection of operations that turn tensors without memory into tensors with values.

Such values are arbitrary contents of free memory. torch refuses most such operations, but its matrix products on CPUs,
and indexing, read free memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode  # torch's own profilers and sanitizers use it

from raysharded.actors.task_calls.task_errors import frames_here, line_here
from raysharded.errors import TaskError

_PLAIN = (torch.Tensor, nn.Parameter)
MADE_LIKE = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
"""Name endings of operations that read only an operand's shape."""


class MemoryWatch(TorchDispatchMode):
    """A mode in which an operation raises `error(operand)` if it makes a tensor with memory from one without.

    Operations that write to tensors without memory, or compute with shapes, are allowed.
    """

    def __init__(self, error: Callable[[torch.Tensor], Exception]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self._error = error

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: code that a task compiles is compiled as without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            found = func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError:
            self._check(args, kwargs)
            raise
        if type(found) in _PLAIN and found.is_meta:  # most results while a model is built
            return found
        if any(not one.is_meta for one in _plain(found)) and not func._schema.name.endswith(MADE_LIKE):
            self._check(args, kwargs)
        return found

    def _check(self, args: Any, kwargs: Any) -> None:
        for one in (*_plain(args), *_plain(tuple((kwargs or {}).values()))):
            if one.is_meta:
                raise self._error(one)


def _plain(value: Any) -> list[torch.Tensor]:
    """Tensors among arguments or results, also in lists; not of subclasses, which handle this themselves."""
    if type(value) in _PLAIN:
        return [value]
    return [one for part in value for one in _plain(part)] if isinstance(value, (list, tuple)) else []


REMEDY = "Do it in the function that session.build calls, or draw first weights by session.build(init_weights=...)."
"""Way out of an error about parameters that have no memory yet, in a user's loop."""


class WriteWatch(MemoryWatch):
    """Also raises an error for an operation that writes to one of these parameters, or to a view of it."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """`names`: identity of a parameter's storage -> its name."""
        super().__init__(self._no_values)
        self._names, self._called = names, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._called = called_by(func)
        if func._schema.is_mutable and args:
            written = args[0] if isinstance(args[0], (list, tuple)) else (args[0],)
            for one in written:
                if name := self._name_of(one):
                    raise TaskError(f"{line_here()}: {self._called} of {name!r} would be lost: {_WHY} {REMEDY}")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _name_of(self, tensor: object) -> str | None:
        return self._names.get(storage_of(tensor)) if isinstance(tensor, torch.Tensor) and tensor.is_meta else None

    def _no_values(self, tensor: torch.Tensor) -> Exception:
        name = self._name_of(tensor)
        of_it = f"the values of {name!r}" if name else f"the values of a tensor of shape {tuple(tensor.shape)}"
        way = REMEDY
        if self._called == "_to_copy":
            way = f"A line that moves the model, such as model.to(device): delete it. Another one: {REMEDY}"
        return TaskError(f"{line_here()}: {of_it} were read, or moved to a device: {_WHY} {way}{_of_a_framework()}")


_WHY = "parameters have no memory between session.build and session.shard, which puts them on the worker's device."

_ADAPTED = {"transformers.trainer": "a Trainer", "accelerate.accelerator": "an Accelerator"}
"""Modules of frameworks that move a model themselves -> the class that an adapter has."""


def _of_a_framework() -> str:
    """A sentence on the adapter if a framework's own class has made the present call; otherwise empty."""
    kinds = (_ADAPTED.get(frame.f_globals.get("__name__", "")) for frame in frames_here())
    kind = next((one for one in kinds if one), None)
    if kind is None:
        return ""
    return f" In a session {kind} is elastic({kind.split()[-1]}, session), of raysharded.adapters."


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def called_by(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]

"""Refusal of a `build_optimizer` that reads the values of parameters, or writes them.

It runs before a generation's state is loaded: the memory of the parameters was never written. A mask of zeros, an
anchor of a penalty or a rate by a norm would be other numbers in every process, and no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from raysharded.actors.model.meta_watch import MADE_LIKE, called_by, storage_of
from raysharded.actors.model.sharded_model import clean_name, local_of
from raysharded.actors.task_calls.task_errors import frames_here, line_here
from raysharded.errors import TaskError

_TEMPLATES = (*MADE_LIKE, "resize_as_")
_READ_ALONE = frozenset(("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"))
"""Operations whose result is no tensor and depends on values."""
_NO_VALUES_YET = (
    "the parameters have no values in build_optimizer. A run that resumes and a worker that joins never have the first "
    "weights, either"
)


class ReadWatch(TorchDispatchMode):
    """A mode in which an operation raises TaskError if it reads, or writes, a parameter's values. Views are allowed."""

    def __init__(self, method: str, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self._method = method
        self._names = {storage_of(local_of(one)): clean_name(name) for name, one in model.named_parameters()}
        self._without_memory = any(one.is_meta for one in model.parameters())
        """True in a check of the program: results have no memory, either."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: code that a task compiles is compiled as without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, called_by(func)
        used = self._first_of((*args, *kwargs.values())) if not name.endswith(_TEMPLATES) else None
        if used is None:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            if self._first_of(args[:1]):
                raise TaskError(
                    f"{line_here()}: {name} of {used!r} would be lost: {_NO_VALUES_YET}. Give parameters their first "
                    "values in Task.init_weights or build_model."
                )
            raise self._read(used, name)
        if name in _READ_ALONE and not _is_printed():
            raise self._read(used, name)
        found = func(*args, **kwargs)
        made = [one for one in _tensors(found) if self._without_memory or not one.is_meta]
        if any(storage_of(local_of(one)) not in self._names for one in made) and not _is_printed():
            raise self._read(used, name)
        return found

    def _first_of(self, values: Any) -> str | None:
        """Name of the first parameter that one of the values is, or is a view of."""
        names = (self._names.get(storage_of(local_of(one))) for one in _tensors(values))
        return next((name for name in names if name), None)

    def _read(self, name: str, called: str) -> TaskError:
        return TaskError(
            f"{line_here()}: the values of {name!r} were read ({called}) in {self._method}: {_NO_VALUES_YET}. Make a "
            "copy, a mask or a number of the weights in the optimizer's first step, and keep it in "
            "optimizer.state[parameter] (`if not state:`), which goes with the parameter. torch.zeros_like(parameter) "
            "reads nothing."
        )


@contextmanager
def refusing_reads(method: str, model: nn.Module) -> Iterator[None]:
    """A context for a call of a task's method in which the model's parameters have no values; see `ReadWatch`.

    Modes that the method leaves entered stay.
    """
    watch = ReadWatch(method, model)
    watch.__enter__()  # type: ignore[no-untyped-call]  # torch has no types there
    try:
        yield
    finally:
        stack = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is watch:
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        else:
            for _ in stack:
                _pop_mode()
            for mode in stack:
                if mode is not watch:
                    _push_mode(mode)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Tensors of all kinds among arguments or results, also in lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for part in value for one in _tensors(part)] if isinstance(value, (list, tuple)) else []


def _is_printed() -> bool:
    """True if torch makes a text of a tensor at present."""
    return any(frame.f_globals.get("__name__") == "torch._tensor_str" for frame in frames_here())

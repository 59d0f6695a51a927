"""Detection of operations that turn tensors without memory into tensors with values.

Such values are arbitrary contents of free memory. torch refuses most such operations, but its matrix products on CPUs,
and indexing, read free memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode  # torch's own profilers and sanitizers use it

_PLAIN = (torch.Tensor, nn.Parameter)
_MADE_LIKE = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
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
        if any(not one.is_meta for one in _plain(found)) and not func._schema.name.endswith(_MADE_LIKE):
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

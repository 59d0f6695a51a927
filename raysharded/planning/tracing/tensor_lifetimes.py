"""Follows the memory of tensors: live bytes, and their peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from raysharded.planning.tracing.tensor_axis import is_of_dtensors


class MemoryFollower(TorchDispatchMode):
    """Follows the storages that this thread's operations create, until they are freed, while it is entered.

    Follows real and fake tensors. Temporary allocations within a kernel and other threads' storages are not seen.
    Storages may be resized without the dispatcher (by FSDP2), so sizes are read anew after each operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._ignored: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0
        """Peak bytes since `restart`."""

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never count these tensors."""
        for tensor in tensors:
            self._note(tensor, self._ignored)

    def follow(self, value: Any) -> None:
        """Count the existing tensors in a nest."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, self._alive)

    def now(self) -> int:
        """Live bytes."""
        dead, total = [], 0
        for key, ref in self._alive.items():
            storage = ref()
            if storage is None:
                dead.append(key)
            else:
                total += storage.nbytes()
        for key in dead:
            del self._alive[key]
        self.peak = max(self.peak, total)
        return total

    def restart(self) -> int:
        """Reset the peak; returns the live bytes."""
        self.peak = 0
        return self.now()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_of_dtensors(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, self._alive)
        self.now()
        return result

    def _note(self, tensor: torch.Tensor, kept: dict[int, weakref.ref[torch.UntypedStorage]]) -> None:
        if is_traceable_wrapper_subclass(tensor):
            attributes, _ = tensor.__tensor_flatten__()
            for inner in (getattr(tensor, name) for name in attributes):
                if isinstance(inner, torch.Tensor):
                    self._note(inner, kept)
            return
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ignored and self._ignored[key]() is not None:
            return
        if key not in kept or kept[key]() is None:
            kept[key] = weakref.ref(storage)

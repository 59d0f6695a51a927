"""A copy of a state in host memory, in a buffer that every copy reuses.

The place of each tensor is computed once. While the layout stays the same, a copy costs about as much as copying that
much memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from raysharded.checkpoint.state_dict.shard_boxes import Held, held_of
from raysharded.checkpoint.state_dict.staging import (
    bytes_of,
    carve,
    host_buffer,
    is_in_place,
    snapshot_bytes,
    synchronize,
)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Places of the copies of one state's tensors, in the order of the state."""

    seen: dict[str, tuple[Any, ...]]
    """For each tensor name: everything that the tensor's place and boxes depend on."""
    copies: list[Held]
    filled: list[int]
    """Numbers of the tensors of which this rank holds a part."""
    views: list[torch.Tensor]
    """Destinations of the `filled` tensors."""
    views_bytes: list[NDArray[np.uint8]]
    devices: frozenset[torch.device]


class HostCopy:
    """Host memory for one copy of a state."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._layout: _Layout | None = None

    def make_room(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Allocate the buffer for a state with tensors like these; its bytes. Raises CheckpointError as `held_of`."""
        return len(self._room_for([held_of(name, tensor) for name, tensor in tensors.items()]))

    def take(self, tensors: Mapping[str, torch.Tensor]) -> list[Held]:
        """A copy of this rank's part of a state, valid until the next `take`.

        Raises CheckpointError for tensors that cannot be stored.
        """
        with torch.no_grad():  # outside autograd a DTensor's local tensor is the memory itself
            locals_ = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
            seen = {name: _seen(tensor, locals_[name]) for name, tensor in tensors.items()}
            layout = self._layout
            if layout is None or layout.seen != seen or list(layout.seen) != list(seen):
                layout = self._layout = self._lay_out(tensors, seen)
            sources = list(locals_.values())
            if layout.filled:
                _copy_all(layout, [sources[number] for number in layout.filled])
            synchronize(layout.devices)
        return layout.copies

    def _lay_out(self, tensors: Mapping[str, torch.Tensor], seen: dict[str, tuple[Any, ...]]) -> _Layout:
        self._layout = None
        held = [held_of(name, tensor) for name, tensor in tensors.items()]
        views = carve(
            self._room_for(held), [(one.dtype, tuple(one.local.shape) if one.parts else (0,)) for one in held]
        )
        filled = [number for number, one in enumerate(held) if one.parts]
        filled_views = [views[number] for number in filled]
        return _Layout(
            seen=seen,
            copies=[replace(one, local=view) for view, one in zip(views, held, strict=True)],
            filled=filled,
            views=filled_views,
            views_bytes=[bytes_of(view) for view in filled_views],
            devices=frozenset(one.local.device for one in held),
        )

    def _room_for(self, held: list[Held]) -> torch.Tensor:
        size = snapshot_bytes(held)
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = self._layout = None  # freed before the larger one is made
            self._buffer = host_buffer(size, pinned=any(one.local.device.type != "cpu" for one in held))
        return self._buffer


def _copy_all(layout: _Layout, sources: list[torch.Tensor]) -> None:
    """Copy each source into its view of host memory. Copies from accelerators are only started."""
    if torch.get_num_threads() == 1 and all(is_in_place(source) for source in sources):
        # C's memcpy: torch's copy takes 1.0 to 1.5 times as long with one thread, and less with several. The byte views
        # are made before the first copy: making them evicts the caches, and interleaved it would take a tenth longer.
        sources_bytes = [bytes_of(source) for source in sources]
        for to, source_bytes in zip(layout.views_bytes, sources_bytes, strict=True):
            np.copyto(to, source_bytes)
    else:
        torch._foreach_copy_(layout.views, sources, non_blocking=True)


def _seen(tensor: torch.Tensor, local: torch.Tensor) -> tuple[Any, ...]:
    placed = (tensor.device_mesh, tensor.placements, tensor.shape) if isinstance(tensor, DTensor) else ()
    shape = None if local.is_nested else local.shape  # a nested tensor has no shape, and is rejected
    return type(local), shape, local.dtype, local.device, local.layout, placed

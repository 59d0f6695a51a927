"""Waits for the device, and marks of the functions that wait for others.

A worker in a marked function is not the cause of a hang. With communicators of an accelerator the host does not wait in
a collective: it launches it, and waits when it next reads a number of the device. So every such read that may follow a
collective goes through `on_host`, which has the mark. It polls: an aborted generation leaves it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, TypeVar

import torch

from raysharded.actors.device.accelerator import Event, accelerator
from raysharded.errors import CollectiveAborted

F = TypeVar("F", bound=Callable[..., Any])

_marked: dict[int, CodeType] = {}
"""id -> the code of a marked function, kept alive so that no other code gets its id."""


def waits_for_peers(function: F) -> F:
    """Mark a function that blocks until other workers have done their part, or fails."""
    _marked[id(function.__code__)] = function.__code__
    return function


def is_marked(code: CodeType) -> bool:
    """True if the code is that of a marked function."""
    return id(code) in _marked


def marked_functions() -> frozenset[tuple[str, str]]:
    """The file and the qualified name of each marked function."""
    return frozenset((code.co_filename, code.co_qualname) for code in _marked.values())


_SHORTEST_S, _LONGEST_S = 20e-6, 1e-3
"""First and longest pause between two polls of an event."""


class _Leaving(threading.local):
    is_aborted: Callable[[], bool] | None = None


_leaving = _Leaving()


def leave_when(is_aborted: Callable[[], bool] | None) -> None:
    """Let the calling thread leave its waits for the device once this is True; None: never."""
    _leaving.is_aborted = is_aborted


@waits_for_peers
def wait_for(event: Event) -> None:
    """Return when the device has reached the event. Raises CollectiveAborted as `leave_when` specifies.

    An abort ends a collective's kernel before its results are there, and the event is reached then, too.
    """
    is_aborted, pause_s = _leaving.is_aborted, _SHORTEST_S
    while not event.query():
        if is_aborted is not None and is_aborted():
            raise CollectiveAborted("aborted while the device had not finished")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
    if is_aborted is not None and is_aborted():
        raise CollectiveAborted("aborted while the device finished")


def wait_on_host(is_done: Callable[[], bool]) -> None:
    """Return once this is true, such as of a thread that allocates.

    Raises CollectiveAborted as `leave_when` specifies.
    """
    is_aborted = _leaving.is_aborted
    while not is_done():
        if is_aborted is not None and is_aborted():
            raise CollectiveAborted("aborted while host memory was allocated")
        time.sleep(_LONGEST_S)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in host memory, once the device has computed them; a host tensor is returned as it is."""
    here = accelerator()
    if not here.has(tensor.device):
        return tensor
    tensor = tensor.detach()
    size_bytes = tensor.numel() * tensor.element_size()
    values = here.pinned(size_bytes).view(tensor.dtype).view(tensor.shape)
    values.copy_(tensor, non_blocking=True)
    wait_for(here.record(here.current_stream(tensor.device)))
    return values


def copy_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in ordinary host memory, for values that are kept: `on_host` takes page-locked memory."""
    return on_host(tensor).detach().clone(memory_format=torch.contiguous_format)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device. The host waits for copies to itself alone: it may read their values at once."""
    return tensor.to(device, non_blocking=accelerator().has(device))


def numbers_of(scalars: Iterable[torch.Tensor]) -> list[Any]:
    """Values of 0-dimensional tensors, in one read per device. Dtypes are promoted to a common one.

    Raises TypeError for integers among floats, which would round them.
    """
    found = list(scalars)
    if len({scalar.is_floating_point() for scalar in found}) > 1:
        raise TypeError(f"integers among floats: {sorted({str(scalar.dtype) for scalar in found})}")
    values: list[Any] = [None] * len(found)
    for device in dict.fromkeys(scalar.device for scalar in found):
        places = [place for place, scalar in enumerate(found) if scalar.device == device]
        read = on_host(torch.stack([found[place] for place in places])).tolist()
        for place, value in zip(places, read, strict=True):
            values[place] = value
    return values

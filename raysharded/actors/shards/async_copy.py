"""Copies of the live state to host memory that are made beside the next step's computation.

What is copied must stay as it is until the copy is there. From a GPU it is one of its copy engines that copies, in the
order of a stream of its own; on CPU a thread, which takes what the training threads leave of the cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from raysharded.checkpoint.threads import step_back


class PendingCopy(Protocol):
    """A copy that was begun."""

    def wait(self) -> None:
        """Return when it is there; raises what it failed with. Any thread, any number of times."""
        ...


class AsyncHostCopy:
    """Begins the copies of one worker's state. Training thread only."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "snapshot", initializer=step_back)

    def begin(self, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> PendingCopy:
        """Copy each source, as the work that was launched before leaves it, into the host tensor at its place.

        From a GPU the host tensors should be pinned: or else this returns when they are filled.
        """
        if self._stream is not None:
            return _OnStream(self._stream, into, sources)
        return _InThread(self._thread, into, sources)


class _InThread:
    def __init__(
        self, thread: ThreadPoolExecutor, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        self._done = thread.submit(_copy, into, sources)

    def wait(self) -> None:
        self._done.result()


class _OnStream:
    def __init__(
        self, stream: torch.cuda.Stream, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            _copy(into, sources)
            self._done = torch.cuda.Event(blocking=True)  # who waits lets others have its core
            self._done.record(stream)

    def wait(self) -> None:
        self._done.synchronize()


def _copy(into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """In one call: the thread that computes would else have to wait for the interpreter at every tensor."""
    if not into:  # a worker may have no row of anything
        return
    with torch.no_grad():
        torch._foreach_copy_(list(into), list(sources), non_blocking=True)

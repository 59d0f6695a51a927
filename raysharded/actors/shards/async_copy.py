"""Copies of the live state to host memory, made in the background of the next step's computation.

A source must not change until its copy is complete. From a GPU one of its copy engines copies, in the order of a
separate stream. On CPU a thread copies, in the CPU time that the training threads leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from raysharded.actors.device.accelerator import Stream, accelerator
from raysharded.checkpoint.threads import step_back


class PendingCopy(Protocol):
    """A copy in progress."""

    def wait(self) -> None:
        """Return when the copy is complete; raises the error of a failed copy. Any thread, any number of times."""
        ...


class AsyncHostCopy:
    """Copies of one worker's state to host memory. Training thread only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = accelerator().new_stream(device) if accelerator().has(device) else None
        self._thread = ThreadPoolExecutor(1, "snapshot", initializer=step_back)

    def begin(self, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> PendingCopy:
        """Start to copy each source, as the work launched before leaves it, into the host tensor at its index.

        From a GPU the host tensors should be pinned: otherwise this returns only when they are filled.
        """
        if self._stream is not None:
            return _OnStream(self._device, self._stream, into, sources)
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
        self, device: torch.device, stream: Stream, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        stream.wait_stream(accelerator().current_stream(device))
        with accelerator().on(stream):
            _copy(into, sources)
        self._done = accelerator().record(stream)

    def wait(self) -> None:
        self._done.synchronize()


def _copy(into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy in one call: otherwise the training thread would have to wait for the interpreter lock at every tensor."""
    if not into:  # a worker may have no row of any tensor
        return
    with torch.no_grad():
        torch._foreach_copy_(list(into), list(sources), non_blocking=True)

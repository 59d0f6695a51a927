"""Backward in another thread, as autograd computes it for a device: the caller's thread waits for it.

Hooks and nodes see that thread's current stream, which is the caller's, and none of the caller's thread-local values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests import patches
from tests.actors.device.simulated.timeline import Timeline, join


def replace_backward(timeline: Timeline, enter_thread: Callable[[], None]) -> None:
    """Replace `torch.autograd.backward`, which `Tensor.backward` calls. `enter_thread`: called in the new thread."""
    backward = torch.autograd.backward
    thread = ThreadPoolExecutor(1, "autograd")
    of_thread = threading.local()

    def run(stream: Any, seen: dict[int, int], args: Any, kwargs: Any) -> dict[int, int]:
        enter_thread()
        of_thread.is_autograd = True
        join(timeline.host, seen)
        with timeline.on(stream):
            backward(*args, **kwargs)
        return dict(timeline.host)

    def in_thread(*args: Any, **kwargs: Any) -> None:
        if getattr(of_thread, "is_autograd", False):  # a node that computes a part again
            backward(*args, **kwargs)
            return
        join(timeline.host, thread.submit(run, timeline.current(), dict(timeline.host), args, kwargs).result())

    patches.replace(torch.autograd, "backward", in_thread)

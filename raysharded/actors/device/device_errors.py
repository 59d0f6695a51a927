"""Errors of a device, and the test whether this process can still use it.

After an illegal access, a failed assertion in a kernel, or an uncorrectable memory error, every later call of the
process to CUDA fails: its context is dead, and only a new process helps. Its host memory stays readable, also pinned
memory. A wrong argument or a lack of memory is an error of one call. Both may have the same text, so the
device is used once more: a dead context fails again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import torch

from raysharded.actors.device.accelerator import accelerator
from raysharded.errors import DeviceFailed, causes, text_of

_TEXTS = ("CUDA error", "CUDA driver error", "HIP error")
"""Beginnings of a RuntimeError of the device, as torch raises it where it does not raise an AcceleratorError."""
PATIENCE_S = 10.0
"""Time in which a device has to do a trifle. It may still end an aborted collective."""
_PAUSE_S = 0.002
_MOSTLY_FREE = 0.9
"""Part of a GPU that is free where no other process uses it."""
MEMORY_PAUSE_S = 0.05
_STEADY_READINGS = 20
"""Number of equal readings, one second, after which the rest counts as used by another process that lives."""
_MOST_READINGS = 200
"""Number of readings in all, ten seconds."""
_WARM = 64
"""Rows and columns of the matrices that a device is warmed up with."""


def device_error_in(error: BaseException) -> str:
    """Text of the device's error among an error and its causes; empty if there is none, or only a lack of memory."""
    for found in causes(error):
        if isinstance(found, torch.OutOfMemoryError):
            continue
        if isinstance(found, torch.AcceleratorError) or (
            isinstance(found, RuntimeError) and text_of(found).startswith(_TEXTS)
        ):
            return text_of(found).partition("\n")[0]
    return ""


def failure_of(device: torch.device, patience_s: float = PATIENCE_S, *, must_finish: bool = True) -> str:
    """The error with which the device fails now, or that it does not finish; empty if it works.

    Launches one small kernel. Without `must_finish`, a device that only takes longer than `patience_s` counts as
    working: it may be in a collective. Returns at once for a device without streams.
    """
    here = accelerator()
    if not here.has(device):
        return ""
    try:
        torch.zeros(1, device=device).add_(1)
        done, until = here.record(here.current_stream(device)), time.monotonic() + patience_s
        while not done.query():
            if time.monotonic() > until:
                return f"a trifle takes more than {patience_s:g} s" if must_finish else ""
            time.sleep(_PAUSE_S)
    except torch.OutOfMemoryError:  # the device works: others have its memory
        return ""
    except RuntimeError as error:  # AcceleratorError is one
        return text_of(error).partition("\n")[0]
    return ""


def wait_for_freed_memory(
    free_and_total: Callable[[], tuple[int, int]], pause: Callable[[float], None] = time.sleep
) -> None:
    """Return once most of a GPU is free, or no more becomes free; after 10 s in any case.

    The driver frees the memory of an ended process some time after the end. A worker in its place would lack it.
    `free_and_total`: bytes of the GPU now.
    """
    before, steady = -1, 0
    for _ in range(_MOST_READINGS):
        free, total = free_and_total()
        steady = steady + 1 if free <= before else 0
        if free >= _MOSTLY_FREE * total or steady >= _STEADY_READINGS:
            return
        before = max(free, before)
        pause(MEMORY_PAUSE_S)


def warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Load what a device loads at first use: its context, libraries of products, and the commonest kernels.

    It takes seconds, for which a worker's peers would wait in its first step. Draws no random numbers. Raises nothing:
    `require_device` finds a device that fails. Returns at once for a device without streams.
    """
    if not accelerator().has(device):
        return
    with contextlib.suppress(RuntimeError):
        weight = torch.full((_WARM, _WARM), 0.5, dtype=dtype, device=device, requires_grad=True)
        inputs = torch.full((2, _WARM, _WARM), 0.5, dtype=dtype, device=device, requires_grad=True)
        normed = torch.nn.functional.layer_norm(inputs, (_WARM,))
        attended = torch.nn.functional.scaled_dot_product_attention(normed, normed, normed)
        found = torch.nn.functional.gelu(torch.nn.functional.linear(attended, weight)).float()
        found.log_softmax(-1).square().sum().backward()
        drain(device)


def drain(device: torch.device, patience_s: float = PATIENCE_S) -> bool:
    """Wait until the device has done all work, also aborted work; True if it has.

    Memory that an aborted collective still reads on another stream must not be given to other tensors before. A device
    that fails, or takes longer than `patience_s`, is found by `require_device`, before anything is allocated on it.
    """
    here = accelerator()
    if not here.has(device):
        return True
    done = threading.Event()

    def wait() -> None:
        with contextlib.suppress(RuntimeError):
            here.drain(device)
            done.set()
        ended.set()

    ended = threading.Event()
    threading.Thread(target=wait, daemon=True, name="drain").start()
    ended.wait(patience_s)
    return done.is_set()


def require_device(device: torch.device) -> None:
    """Raise DeviceFailed unless the device works, and has done all earlier work on all its streams."""
    failed = failure_of(device)
    if not failed and not drain(device):
        failed = failure_of(device, _PAUSE_S, must_finish=False)
        failed = failed or f"earlier work takes more than {PATIENCE_S:g} s, or fails"
    if failed:
        raise DeviceFailed(failure_text(device, failed))


def failure_text(device: torch.device, failed: str, first: str = "") -> str:
    """The sentence on a device that does not work: its error now, the first one, and what its driver reported."""
    before = "" if first in ("", failed) else f" (first: {first})"
    reported = "; ".join(accelerator().complaints(device))
    return f"the GPU does not work in this process: {failed}{before}{f'. It reported {reported}' if reported else ''}"

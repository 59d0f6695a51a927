"""Use of this process's GPU, for metrics: memory, utilization, temperature.

A thread reads it every two seconds. A read may take milliseconds, and locks of the allocator, which no step waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from raysharded.actors.device.accelerator import accelerator

_EVERY_S = 2.0


@dataclass(slots=True)
class DeviceUse:
    """The newest use of one device. Any thread."""

    device: torch.device
    newest: Mapping[str, float] = field(default_factory=dict)
    """Name -> number, as the accelerator reads it; empty before the first read."""

    def read(self) -> bool:
        """Read the use now; False if the device does not answer any more."""
        try:
            self.newest = dict(accelerator().use(self.device))
        except RuntimeError:  # AcceleratorError is one: the context is dead
            return False
        return True

    def start(self) -> None:
        """Read at once, and in a thread from now on."""
        if self.read():
            threading.Thread(target=self._run, daemon=True, name="device use").start()

    def _run(self) -> None:
        accelerator().enter_thread()
        while self.read():
            time.sleep(_EVERY_S)


_of_process: list[DeviceUse] = []
"""That of this process, if it has a device."""


def begin(device: torch.device) -> None:
    """Begin to read the use of this process's device; do nothing without one."""
    if accelerator().has(device):
        _of_process.append(DeviceUse(device))
        _of_process[-1].start()


def newest() -> Mapping[str, float]:
    """The newest use of this process's device; empty without one."""
    return _of_process[-1].newest if _of_process else {}

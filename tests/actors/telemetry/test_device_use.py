"""Use of a device, read in a thread until the device fails."""

from __future__ import annotations

import threading

import pytest
import torch

from raysharded.actors.device import accelerator
from raysharded.actors.telemetry import device_use
from raysharded.actors.telemetry.device_use import DeviceUse
from tests.actors.device.host_accelerator import HostAccelerator


class Filling(HostAccelerator):
    """A device whose memory fills with each read, until it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.failed = threading.Event()

    def use(self, device: torch.device) -> dict[str, float]:
        self.reads += 1
        if self.reads > 3:
            self.failed.set()
            raise torch.AcceleratorError("CUDA error: the context is dead")
        return {"used_bytes": float(self.reads)}


def test_the_newest_use_stays_when_the_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_use, "_EVERY_S", 0.001)
    device = Filling()
    undo = accelerator.use(device)
    try:
        use = DeviceUse(torch.device("cpu"))
        use.start()
        assert device.failed.wait(60.0)
    finally:
        undo()
    assert use.newest == {"used_bytes": 3.0}


def test_a_process_without_a_device_has_no_use() -> None:
    device_use.begin(torch.device("cpu"))
    assert device_use.newest() == {}

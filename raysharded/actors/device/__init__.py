"""The device that a worker computes on: streams, events, pinned memory, communicators. Only here is CUDA named."""

from __future__ import annotations

from raysharded.actors.device.accelerator import use
from raysharded.actors.device.cuda import Cuda

use(Cuda())

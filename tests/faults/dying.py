"""A task that ends its worker's process at one microbatch, in one of several ways."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import raysharded as rs
from tests.training.harness import GptTask


def leave() -> None:
    os._exit(3)


def crash() -> None:
    ctypes.string_at(0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Dies(GptTask):
    """The first worker to compute its fifth loss ends its process, and then every worker that computes the same
    samples, until `times` have died."""

    def __init__(self, folder: Path, die: Callable[[], None], *, times: int) -> None:
        self._folder, self._die, self._times, self._calls = str(folder), die, times, 0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        self._calls += 1
        found = hashlib.sha256(batch.numpy().tobytes()).hexdigest()
        died = Path(self._folder, "died")
        if self._calls == 5 and not died.exists():
            own = Path(self._folder, f"own-{os.getpid()}")
            own.write_text(found)
            with contextlib.suppress(FileExistsError):
                os.link(own, died)  # one worker's, and whole
        if died.exists() and self._is_due(died.read_text(), found):
            Path(self._folder, f"death-{os.getpid()}").touch()
            self._die()
        return super().loss(model, batch)

    def _is_due(self, first: str, found: str) -> bool:
        dead = len(list(Path(self._folder).glob("death-*")))
        return dead < self._times and found == first

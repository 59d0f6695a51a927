"""Datasets for processes that begin anew: nothing here loads torch, except on request."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


class Large:
    """Sample i is `length` times i, with a name and a number."""

    def __init__(self, length: int) -> None:
        self.table = np.arange(50, dtype=np.int64)
        self.length = length

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        values = np.full(self.length, self.table[index])
        return {"values": values, "name": f"sample {index}", "number": index, "pid": os.getpid()}


class Drawing(Large):
    """Seeds with the index, and draws; with torch, which it loads itself, if `with_torch`."""

    def __init__(self, *, with_torch: bool) -> None:
        super().__init__(3)
        self.with_torch = with_torch

    def __getitem__(self, index: int) -> dict[str, Any]:
        np.random.seed(index)
        random.seed(index)
        sample = {"numpy": np.random.random(3), "random": random.random(), "torch loaded": "torch" in sys.modules}
        if self.with_torch:
            import torch

            torch.manual_seed(index)
            sample |= {
                "torch": torch.rand(2, 3).t(),
                "half": torch.rand(2).bfloat16(),
                "threads": torch.get_num_threads(),
            }
            sample |= {"number": torch.tensor(0.1 * index)}
            sample |= {"none": torch.empty(0, 2), "scalar": torch.tensor(True)}
        return sample


class Unlike(Large):
    """Samples that are awkward: by index, one that dies, one that does not pickle, one that hangs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(3)
        self.folder = str(folder)

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            os._exit(7)
        if index == 2:
            return lambda: index
        if index == 3:
            Path(self.folder, "hangs").touch()
            lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
            for _ in range(2):  # like an extension that never releases the interpreter
                lock(mutex)
        if index == 4:
            raise KeyError("no such row")
        if index == 5:
            raise KeyboardInterrupt
        return super().__getitem__(index)


class OnceEach(Large):
    """Samples that give trouble at their first reading: by index, one that hangs, dies, or raises."""

    def __init__(self, folder: Path) -> None:
        super().__init__(3)
        self.folder = str(folder)

    def is_first(self, what: str, times: int = 1) -> bool:
        """True for the first readings of a sample, in any process."""
        for number in range(times):
            try:
                Path(self.folder, f"{what}-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return False

    def __getitem__(self, index: int) -> Any:
        if index == 3 and self.is_first("hangs"):
            time.sleep(600)
        if index == 4 and self.is_first("is killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 5 and self.is_first("fails", times=2):
            raise OSError(5, "Input/output error", "shard-7.tar")
        if index == 6 and self.is_first("is wrong"):
            raise KeyError("no such row")
        return super().__getitem__(index)


class Restarting:
    """Numbers without end, which continue at a state."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at - 1


class Slow(Restarting):
    """Takes a while for each number, and hangs once at one of them."""

    def __init__(self, folder: Path, hangs_at: int) -> None:
        super().__init__()
        self.once, self.hangs_at = OnceEach(folder), hangs_at

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            time.sleep(0.02)
            if number == self.hangs_at and self.once.is_first("hangs"):
                time.sleep(600)
            yield number


class Together(Large):
    """Each sample waits until the samples of `number` processes are being read."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(3)
        self.folder, self.number = str(folder), number

    def __getitem__(self, index: int) -> Any:
        Path(self.folder, str(os.getpid())).touch()
        deadline = time.monotonic() + 60
        while len(os.listdir(self.folder)) < self.number:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.number} processes do not read at once")
            time.sleep(0.005)
        return super().__getitem__(index)


def leave_torch_alone() -> None:
    """Settings for a process that does not load it."""


def two_threads() -> None:
    import torch

    torch.set_num_threads(2)

"""A worker waits for the memory of the one that it replaces, and for no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, count, repeat

import pytest

from raysharded.actors.device.cuda import Cuda
from raysharded.actors.device.device_errors import MEMORY_PAUSE_S, wait_for_freed_memory

TOTAL = 1000


def waited_s(free: Iterator[int]) -> tuple[float, int]:
    """The seconds that a wait takes while a GPU has so much free memory at each reading, and the last reading."""
    pauses: list[float] = []
    read: list[int] = []

    def free_and_total() -> tuple[int, int]:
        read.append(next(free))
        return read[-1], TOTAL

    wait_for_freed_memory(free_and_total, pauses.append)
    return sum(pauses), read[-1]


@pytest.mark.parametrize(
    ("free", "seconds", "last"),
    [
        (lambda: repeat(950), 0.0, 950),
        (lambda: chain([100] * 15, [500] * 15, repeat(950)), 30 * MEMORY_PAUSE_S, 950),  # the killed worker's is freed
        (lambda: repeat(400), 1.0, 400),  # another process has the rest
        (lambda: chain([100, 600], repeat(400)), 1.05, 400),  # one that begins beside it
        (lambda: count(1), 10.0, 200),  # it never ends
    ],
    ids=["free", "freed", "shared", "taken", "growing"],
)
def test_a_worker_waits_for_memory_that_is_being_freed(
    free: Callable[[], Iterator[int]], seconds: float, last: int
) -> None:
    waited, read = waited_s(free())
    assert (waited == pytest.approx(seconds, abs=MEMORY_PAUSE_S + 1e-9), read) == (True, last)


def test_a_gpu_is_taken_once_its_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = chain([100] * 3, repeat(950))
    read: list[int] = []

    def info(index: int) -> tuple[int, int]:
        read.append(index)
        return next(free), TOTAL

    monkeypatch.setattr("torch.cuda.mem_get_info", info)
    for name in ("why_unusable", "enter_thread"):
        monkeypatch.setattr(Cuda, name, lambda _: "")
    monkeypatch.setattr("raysharded.actors.device.cuda.why_unfit", lambda *_: "")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    class Reached(Exception):
        """The rest of `select` needs a GPU."""

    def reached(_: int) -> None:
        raise Reached

    monkeypatch.setattr("torch.cuda.get_device_properties", reached)
    with pytest.raises(Reached):
        Cuda().select([])
    assert read == [0] * 4

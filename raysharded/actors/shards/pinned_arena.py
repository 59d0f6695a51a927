"""Page-locked host memory of one worker, kept for the run and carved anew for each layout.

Locking pages takes seconds, and an allocator for page-locked memory rounds sizes up to powers of two. So memory is
taken in few large regions, and buffers are spans of them. A layout's buffers lie at one end of a region, and those of
the next layout at the other: once the older ones are free, the free memory is in one piece.

A span belongs to a tensor: when nothing refers to the tensor's memory any more, the span is free. Arithmetic alone: the
memory comes from `allocate`, which may give ordinary memory.
"""

from __future__ import annotations

import threading
import weakref
from bisect import insort
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

ALIGNMENT = 4096
"""Each span begins and ends at a multiple of this."""


@dataclass(slots=True, eq=False)
class _Region:
    """One allocation. `spans`: (begin, end) of the used ones, in order."""

    memory: torch.Tensor
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.memory.numel()

    def holes(self) -> list[tuple[int, int]]:
        """(begin, end) of the free spans, in order."""
        ends = [0, *(end for _, end in self.spans)]
        begins = [*(begin for begin, _ in self.spans), self.size]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if begin > end]


class PinnedArena:
    """Regions of page-locked memory. One thread takes; any thread may drop a tensor."""

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        wait: Callable[[Callable[[], bool]], None] | None = None,
    ) -> None:
        """`allocate`: from a size to uint8 [size], not initialized. `wait`: returns once its argument is true; `take`
        raises its error. None: it waits without a limit."""
        self._allocate, self._wait = allocate, wait
        self._regions: list[_Region] = []
        self._coming: Future[torch.Tensor] | None = None
        """Memory of the first region, while it is allocated in the background."""
        self._lock = threading.Lock()
        self._freed: list[tuple[_Region, tuple[int, int]]] = []
        """Spans without a tensor. Appended by finalizers, which take no lock."""
        self.num_allocations = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(region.size for region in self._regions)

    def begin(self, size_bytes: int) -> None:
        """Allocate the first region in the background: locking its pages takes seconds. `take` waits for it.

        Does nothing if there is a region, or if one is allocated already. If the allocation fails, `take` raises its
        error.
        """
        if size_bytes and not self._regions and self._coming is None:
            self._coming = coming = Future[torch.Tensor]()
            arguments = (coming, self._allocate, aligned(size_bytes))
            threading.Thread(target=_fulfil, args=arguments, daemon=True, name="pages").start()

    def take(self, size_bytes: int, *, at_end: bool = False, ahead_bytes: int = 0) -> torch.Tensor:
        """A span as uint8 [size_bytes], not initialized: of the smallest free piece that is large enough.

        `at_end`: the last part of it, not the first. If none is large enough, regions without a span are given back,
        and a new region is allocated, `ahead_bytes` larger than the span: for spans that follow. While there is no
        span, a piece must be large enough for both.
        """
        if not size_bytes:
            return torch.empty(0, dtype=torch.uint8)
        length = aligned(size_bytes)
        with self._lock:
            self._add_coming()
            self._collect()
            is_first = not any(region.spans for region in self._regions)
            together = length + aligned(ahead_bytes)
            found = self._find(together if is_first else length)
            if found is None:
                self._regions = [region for region in self._regions if region.spans]
                region = self._add(self._allocate(together))
                found = region, (0, region.size)
            region, (begin, end) = found
            span = (end - length, end) if at_end else (begin, begin + length)
            insort(region.spans, span)
        return self._tensor(region, span, size_bytes)

    def _add_coming(self) -> None:
        if self._coming is None:
            return
        if self._wait is not None:
            self._wait(self._coming.done)
        coming, self._coming = self._coming, None
        self._add(coming.result())

    def _add(self, memory: torch.Tensor) -> _Region:
        region = _Region(memory)
        self.num_allocations += 1
        self._regions.append(region)
        return region

    def _tensor(self, region: _Region, span: tuple[int, int], size_bytes: int) -> torch.Tensor:
        """The span as a tensor with a separate storage, whose end frees the span."""
        view = region.memory[span[0] : span[0] + size_bytes]
        owner = view.numpy()
        found = torch.from_numpy(owner)
        weakref.finalize(owner, self._freed.append, (region, span)).atexit = False
        return found

    def _collect(self) -> None:
        while self._freed:
            region, span = self._freed.pop()
            region.spans.remove(span)

    def _find(self, length: int) -> tuple[_Region, tuple[int, int]] | None:
        fitting = [
            (hole[1] - hole[0], index, hole)
            for index, region in enumerate(self._regions)
            for hole in region.holes()
            if hole[1] - hole[0] >= length
        ]
        if not fitting:
            return None
        _, index, hole = min(fitting)
        return self._regions[index], hole


def _fulfil(future: Future[torch.Tensor], allocate: Callable[[int], torch.Tensor], size_bytes: int) -> None:
    try:
        future.set_result(allocate(size_bytes))
    except BaseException as error:  # noqa: BLE001 - raised by `take`
        future.set_exception(error)


def aligned(size_bytes: int) -> int:
    """Bytes of a span for so many."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT

"""Blocks in memory: read by several threads at once, ahead of their use, and bounded.

The order of reads is known exactly, so blocks are read ahead in the order of their first use, and only those that are
not there. Blocks that were read ahead and not used yet are bounded by themselves: nobody reads further ahead than that.
Of the used ones, those that were not used longest are dropped.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from raysharded.data.store.layout import Bytes


class BlockCache:
    """Blocks by number. Any thread may call it.

    Memory: `limit_bytes`, and in addition one block for each thread of `num_readers`, and what `get_all` returns.
    """

    def __init__(self, read: Callable[[int], Bytes], *, limit_bytes: int, ahead_bytes: int, num_readers: int) -> None:
        """`read`: called by several threads at once. `ahead_bytes`: for blocks that were read ahead, of the limit."""
        self._read, self._limit_bytes, self._ahead_bytes = read, limit_bytes, ahead_bytes
        self._num_readers = num_readers
        self._used: OrderedDict[int, Bytes] = OrderedDict()
        self._ahead: dict[int, Bytes] = {}
        self._in_flight: dict[int, Future[Bytes]] = {}
        self._unexpected: set[int] = set()
        """Blocks in flight that are no longer expected."""
        self._wanted: deque[int] = deque()
        self._block_bytes = 0
        """Size of the largest block so far."""
        self._bytes = self._bytes_ahead = 0
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks in memory."""
        with self._lock:
            return self._bytes

    def get(self, number: int) -> Bytes:
        """The block, read now if it is not there; after `close` in the caller's thread. Raises what `read` raises."""
        return self.get_all([number])[number]

    def get_all(self, numbers: Iterable[int]) -> dict[int, Bytes]:
        """These blocks, as `get`; those that are not there are read at once."""
        found: dict[int, Bytes] = {}
        futures: dict[int, Future[Bytes] | None] = {}
        with self._lock:
            for number in numbers:
                if number in found or number in futures:
                    continue
                block = self._taken(number)
                if block is not None:
                    found[number] = block
                else:
                    begins = number in self._in_flight or not self._closed
                    futures[number] = self._begin(number) if begins else None
            self._pump()
        if not futures:
            return found
        for number, future in futures.items():
            found[number] = self._read(number) if future is None else future.result()
        with self._lock:
            for number, future in futures.items():
                if future is not None:
                    self._taken(number)  # unless others pushed it out meanwhile
            self._pump()
        return found

    def expect(self, numbers: Iterable[int]) -> None:
        """These blocks will be used next, in this order, after those that were expected before."""
        with self._lock:
            waiting = set(self._wanted)
            for number in numbers:
                if number not in waiting and not self._has(number):
                    waiting.add(number)
                    self._wanted.append(number)
            self._pump()

    def forget(self) -> None:
        """Nothing is expected any more, as after a change of what is read."""
        with self._lock:
            self._wanted.clear()
            self._unexpected = set(self._in_flight)
            for number, block in self._ahead.items():  # they may still be used: they are the first to be dropped
                self._used[number] = block
                self._used.move_to_end(number, last=False)
            self._ahead.clear()
            self._bytes_ahead = 0
            self._drop_oldest()

    def close(self) -> None:
        """End the threads after the reads in progress, and drop all blocks. Does not wait."""
        with self._lock:
            self._closed = True
            self._wanted.clear()
            self._used.clear()
            self._ahead.clear()
            self._bytes = self._bytes_ahead = 0
            threads = self._threads
        if threads is not None:
            threads.shutdown(wait=False)  # not cancelled: others may wait for these reads

    def _has(self, number: int) -> bool:
        return number in self._used or number in self._ahead or number in self._in_flight

    def _taken(self, number: int) -> Bytes | None:
        block = self._used.get(number)
        if block is not None:
            self._used.move_to_end(number)
            return block
        block = self._ahead.pop(number, None)
        if block is not None:
            self._bytes_ahead -= len(block)
            self._used[number] = block
            self._drop_oldest()  # also this one, if it is larger than the limit
        return block

    def _begin(self, number: int) -> Future[Bytes]:
        """The read of a block, in progress or begun now. With the lock."""
        if number not in self._in_flight:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._num_readers, "raysharded-blocks")
            future: Future[Bytes] = Future()
            self._in_flight[number] = future
            try:
                self._threads.submit(self._carry_out, number, future)
            except RuntimeError as error:  # no thread can be started, and one that runs may be busy for long
                del self._in_flight[number]
                future.set_exception(error)
                return future
        return self._in_flight[number]

    def _carry_out(self, number: int, future: Future[Bytes]) -> None:
        block, failure = None, None
        with self._lock:
            if self._in_flight.get(number) is not future:
                return  # it stayed in the queue of the threads when none could be started
        try:
            block = self._read(number)
        except BaseException as error:  # noqa: BLE001 - raised where the block is taken
            failure = error
        with self._lock:
            del self._in_flight[number]
            if block is not None and not self._closed:
                self._bytes += len(block)
                if number in self._unexpected:
                    self._used[number] = block
                else:
                    self._ahead[number] = block
                    self._bytes_ahead += len(block)
                self._block_bytes = max(self._block_bytes, len(block))
                self._drop_oldest()
            self._unexpected.discard(number)
            self._pump()
        if failure is not None:
            future.set_exception(failure)
        elif block is not None:
            future.set_result(block)

    def _pump(self) -> None:
        """Begin the next reads ahead, within the bounds. With the lock."""
        while self._wanted and not self._closed and len(self._in_flight) < self._num_readers:
            expected = self._bytes_ahead + len(self._in_flight) * self._block_bytes
            if self._ahead_bytes and expected + self._block_bytes > self._ahead_bytes and expected:
                return
            number = self._wanted.popleft()
            if not self._has(number) and self._begin(number).done():  # no thread could be started
                self._wanted.appendleft(number)
                return

    def _drop_oldest(self) -> None:
        while self._bytes > self._limit_bytes and self._used:
            self._bytes -= len(self._used.popitem(last=False)[1])
        while self._bytes > self._limit_bytes and len(self._ahead) > 1:  # the limit is smaller than what is read ahead
            number = next(iter(self._ahead))
            block = self._ahead.pop(number)
            self._bytes -= len(block)
            self._bytes_ahead -= len(block)

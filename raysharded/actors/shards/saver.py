"""Saves of this worker's part of a checkpoint, in the background, straight from its snapshot in host memory.

Nothing is copied: the snapshot's buffer is held while it is hashed and written, and training takes another one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

from raysharded.actors.numerics.step_consensus import Flags
from raysharded.actors.shards.store import ShardBuffer
from raysharded.checkpoint import ShardTensor, Storage, write_shard
from raysharded.checkpoint.threads import step_back
from raysharded.ids import GenerationId
from raysharded.layout import ShardMap, Share, partial as fingerprint_partial
from raysharded.protocol.messages import Saved, save_prefix

BEGIN_TIMEOUT_S = 30.0
"""Longest lag of a worker behind the one that reported the save."""
_RESULTS_KEPT = 256
"""Largest number of newest results kept: a driver that stood still for a while cannot be further behind."""
_RESULTS_BYTES = 32 << 20
"""Largest size of the results kept, besides the two newest: of a model with many tensors one takes megabytes."""
_TENSOR_BYTES = 64
"""Bytes of a result for each tensor of the state: its part of the fingerprint, and its place in a file."""
_LOOK_UP_S = 0.1
_WHOLE = Share()


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Decision of all workers about a checkpoint of the step that they agreed on."""

    start: bool = False
    asked: bool = False
    """True if the save is requested, whether or not it is due."""
    late: bool = False
    """True if the save is due and left out: the previous one is still being written somewhere."""


def decide(flags: Flags, *, due: bool, last: bool) -> Decision:
    """Decide about a checkpoint; one is written at a time.

    While another is being written, a due checkpoint is left out. A requested one is requested again in the next step;
    that of the last step waits.
    """
    if not (due or flags.save_now):
        return Decision()
    if flags.save_busy and not last:
        return Decision(late=due)
    return Decision(start=True, asked=flags.save_now)


class Saver:
    """Saves of one worker, one at a time. The training thread calls `begin`; any thread the other methods."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._condition = threading.Condition()
        self._saving: tuple[GenerationId, int] | None = None
        self._results: dict[tuple[GenerationId, int], Saved] = {}
        """Results of the newest saves, for the driver to collect."""
        self._newest = (GenerationId(0), 0)
        """The newest save that was begun. Saves begin in order: an older one that is not being written and has no
        result was never begun, or its result was dropped."""
        self._begun: SimpleQueue[tuple[ShardBuffer, GenerationId, str, Share]] = SimpleQueue()
        # a thread that exists already: starting one would make the training thread wait
        threading.Thread(target=self._run, daemon=True, name="save").start()

    @property
    def busy(self) -> bool:
        """True while a save is being written."""
        with self._condition:
            return self._saving is not None

    def wait_until_idle(self, given_up: Callable[[], bool]) -> bool:
        """True once no save is being written; False as soon as `given_up()`, which is polled, returns True."""
        with self._condition:
            while self._saving is not None:
                if given_up():
                    return False
                self._condition.wait(_LOOK_UP_S)
            return True

    def begin(self, snapshot: ShardBuffer, generation: GenerationId, driver: str = "", share: Share = _WHOLE) -> None:
        """Write a share of a snapshot in the background, as soon as it is complete, for a generation of this driver.

        The snapshot is held until the end. Must not be called while busy.
        """
        with self._condition:
            assert self._saving is None
            self._saving = self._newest = (generation, snapshot.step)
            self._condition.notify_all()
        snapshot.hold()
        self._begun.put((snapshot, generation, save_prefix(snapshot.step, generation, driver), share))

    def write(self, snapshot: ShardBuffer, generation: GenerationId, driver: str) -> Saved:
        """Write a snapshot now, even while another is being written. It must not be filled meanwhile."""
        prefix = save_prefix(snapshot.step, generation, driver)
        return self._written(snapshot, snapshot.step, generation, prefix, _WHOLE)

    def _run(self) -> None:
        step_back()
        while True:
            self._write(*self._begun.get())

    def _write(self, snapshot: ShardBuffer, generation: GenerationId, prefix: str, share: Share) -> None:
        step = snapshot.step
        try:
            saved = self._written(snapshot, step, generation, prefix, share)
        finally:
            snapshot.release()
        with self._condition:
            self._saving = None
            self._results[(generation, step)] = saved
            self._drop_oldest()
            self._condition.notify_all()

    def _drop_oldest(self) -> None:
        while len(self._results) > _RESULTS_KEPT or (
            len(self._results) > 2 and sum(map(_size_of, self._results.values())) > _RESULTS_BYTES
        ):
            del self._results[next(iter(self._results))]

    def _written(self, snapshot: ShardBuffer, step: int, generation: GenerationId, prefix: str, share: Share) -> Saved:
        started, retries = time.monotonic(), self._storage.retries
        rank = share.index * snapshot.world_size + snapshot.rank
        pieces = snapshot.pieces.part(share)
        try:
            snapshot.wait()
            files = write_shard(
                self._storage,
                prefix,
                writer=f"rank{rank:05d}",
                tensors=list(_pieces(snapshot, pieces)),
            )
            data = snapshot.data.numpy()
            part = fingerprint_partial(snapshot.spec, pieces, data, count_replicated=snapshot.rank == 0)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: training continues
            return Saved(generation=generation, step=step, error=f"{type(error).__name__}: {error}")
        return Saved(
            generation=generation,
            step=step,
            files=tuple(files),
            fingerprint=part,
            spec=snapshot.spec,
            registered=snapshot.registered if rank == 0 else "",
            seconds=time.monotonic() - started,
            retries=self._storage.retries - retries,
        )

    def collect(self, generation: GenerationId, step: int, timeout_s: float) -> Saved:
        """Wait for a save and return its outcome; it may be requested shortly before this worker begins it.

        Returns at once if a newer save was begun and this one has no result.
        """
        wanted = (generation, step)
        with self._condition:
            begun = self._is_begun(wanted, timeout_s)
            if begun and self._condition.wait_for(lambda: wanted in self._results, timeout_s):
                return self._results[wanted]
            if begun:
                error = f"the save of step {step} takes longer than {timeout_s} s"
            elif self._newest >= wanted:
                error = f"the save of step {step} is not known any more: newer ones were begun"
            else:
                error = f"the save of step {step} was not begun within {BEGIN_TIMEOUT_S} s"
        return Saved(generation=generation, step=step, error=error, unknown=not begun)

    def _is_begun(self, wanted: tuple[GenerationId, int], timeout_s: float) -> bool:
        """True once a save is begun; False as soon as a newer one was begun in its place.

        Waits as long as the previous save takes and BEGIN_TIMEOUT_S more, at most `timeout_s`.
        """
        now = time.monotonic()
        deadline, patience_ends = now + timeout_s, now + BEGIN_TIMEOUT_S
        while wanted not in self._results and self._saving != wanted:
            now = time.monotonic()
            if self._newest >= wanted:
                return False
            if self._saving is not None:
                patience_ends = now + BEGIN_TIMEOUT_S
            if now >= min(deadline, patience_ends):
                return False
            self._condition.wait(min(deadline, patience_ends) - now)
        return True


def _size_of(saved: Saved) -> int:
    """Bytes of a result in memory, about."""
    tensors = 0 if saved.fingerprint is None else len(saved.fingerprint)
    return _TENSOR_BYTES * tensors + len(saved.registered)


def _pieces(snapshot: ShardBuffer, pieces: ShardMap) -> Iterator[ShardTensor]:
    """This worker's boxes. Tensors that every worker holds whole are only among those of shard 0."""
    data = snapshot.data.numpy()
    for piece in pieces.pieces(snapshot.spec):
        if not piece.tensor.replicated or snapshot.rank == 0:
            yield ShardTensor(
                name=piece.tensor.name,
                dtype=piece.tensor.dtype,
                shape=piece.tensor.shape,
                offsets=piece.offsets,
                sizes=piece.sizes,
                data=data[piece.place],
            )


def fingerprint_of(own: ShardBuffer, share: Share, generation: GenerationId) -> Saved:
    """This worker's part of the fingerprint, from its own buffer, without a file."""
    part = fingerprint_partial(own.spec, own.pieces.part(share), own.data.numpy(), count_replicated=own.rank == 0)
    return Saved(generation=generation, step=own.step, fingerprint=part, spec=own.spec)

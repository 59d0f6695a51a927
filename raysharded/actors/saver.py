"""Writes this worker's part of a checkpoint beside training, from a copy of its snapshot."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from raysharded.actors.shards import ShardBuffer
from raysharded.checkpoint import ShardTensor, Storage, write_shard
from raysharded.driver.messages import Saved, save_prefix
from raysharded.ids import GenerationId
from raysharded.layout import partial as fingerprint_partial

BEGIN_TIMEOUT_S = 30.0
"""How long a worker may be behind the one that reported the save."""
_RESULTS_KEPT = 4


class Saver:
    """One save at a time. `begin` and `busy` are called by the training thread, `collect` by any other."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._condition = threading.Condition()
        self._saving: tuple[GenerationId, int] | None = None
        self._results: dict[tuple[GenerationId, int], Saved] = {}
        """The newest few, until the driver has asked for them."""
        self._copy = torch.empty(0, dtype=torch.uint8)

    @property
    def busy(self) -> bool:
        """Whether a save is still being written."""
        with self._condition:
            return self._saving is not None

    def begin(self, snapshot: ShardBuffer, generation: GenerationId) -> None:
        """Copy the snapshot and write it in the background. Must not be called while busy."""
        with self._condition:
            assert self._saving is None
            self._saving = (generation, snapshot.step)
            self._condition.notify_all()
        if self._copy.numel() != snapshot.data.numel():
            self._copy = torch.empty_like(snapshot.data)
        self._copy.copy_(snapshot.data)
        threading.Thread(
            target=self._write, args=(snapshot, snapshot.step, generation), daemon=True, name="save"
        ).start()

    def _write(self, shape: ShardBuffer, step: int, generation: GenerationId) -> None:
        saved = self._written(shape, step, generation)
        with self._condition:
            self._saving = None
            self._results[(generation, step)] = saved
            while len(self._results) > _RESULTS_KEPT:
                del self._results[next(iter(self._results))]
            self._condition.notify_all()

    def _written(self, shape: ShardBuffer, step: int, generation: GenerationId) -> Saved:
        try:
            files = write_shard(
                self._storage,
                save_prefix(step, generation),
                writer=f"rank{shape.rank:05d}",
                tensors=list(_pieces(shape, self._copy)),
            )
            part = fingerprint_partial(shape.spec, shape.pieces, self._copy.numpy(), count_replicated=shape.rank == 0)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: training goes on
            return Saved(generation=generation, step=step, error=f"{type(error).__name__}: {error}")
        return Saved(generation=generation, step=step, files=tuple(files), fingerprint=part, spec=shape.spec)

    def collect(self, generation: GenerationId, step: int, timeout_s: float) -> Saved:
        """Wait for a save and return its outcome; it may be asked for a moment before this worker begins it."""
        wanted = (generation, step)
        with self._condition:
            begun = self._condition.wait_for(
                lambda: wanted in self._results or self._saving == wanted, min(BEGIN_TIMEOUT_S, timeout_s)
            )
            if begun and self._condition.wait_for(lambda: wanted in self._results, timeout_s):
                return self._results[wanted]
        waited = f"takes longer than {timeout_s} s" if begun else f"was not begun within {BEGIN_TIMEOUT_S} s"
        return Saved(generation=generation, step=step, error=f"the save of step {step} {waited}")


def _pieces(shape: ShardBuffer, data: torch.Tensor) -> Iterator[ShardTensor]:
    """This worker's boxes; what every worker holds whole is written by rank 0 alone."""
    for piece in shape.pieces.pieces(shape.spec):
        if not piece.tensor.replicated or shape.rank == 0:
            yield ShardTensor(
                name=piece.tensor.name,
                dtype=piece.tensor.dtype,
                shape=piece.tensor.shape,
                offsets=piece.offsets,
                sizes=piece.sizes,
                data=data.numpy()[piece.place],
            )

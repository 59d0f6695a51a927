"""raysharded as a reader of `benchmarks.epochs`: each process reads the microbatches of its rank, as a worker does.

`--no-disk`: without the cache on the node's disk.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from benchmarks.epochs import Order, arguments, order_of, serve
from raysharded.actors.step.collation import joined
from raysharded.config import BatchConfig
from raysharded.data import MicrobatchLoader, TokenDataset

_ORDER = 2


class OwnEpoch:
    """The batches of an epoch's part, [batch, seq_len + 1]; read ahead within the context."""

    def __init__(self, order: Order, url: str, *, disk: bool) -> None:
        size, kept = order.batch, {} if disk else {"disk_cache_bytes": 0}
        dataset = TokenDataset(url, seq_len=order.seq_len, disk_cache=order.cache, **kept)
        batch = BatchConfig(global_batch_size=size * order.world, microbatch_size=size, seed=1)
        self._steps, self._rank = range(1, len(dataset) // batch.global_batch_size + 1), order.rank
        self._loader = MicrobatchLoader(dataset, batch, prefetch=True)
        self._loader.skip((), _ORDER, (dataset.samples_per_block, batch.global_batch_size))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loader.close()

    def __iter__(self) -> Iterator[Any]:
        for step in self._steps:
            self._loader.plan([(step, self._rank), (step + 1, self._rank)])
            yield joined(self._loader.load(step, self._rank).samples)


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # as in a worker
    parser = arguments()
    parser.add_argument("--no-disk", action="store_true")
    options = parser.parse_args()
    serve(order_of(options), partial(OwnEpoch, disk=not options.no_disk))


if __name__ == "__main__":
    main()

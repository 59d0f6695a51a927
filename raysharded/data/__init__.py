"""Samples: their order, their reading, and the record of what was read.

`order` computes the sample at a position, `dataset` and `text.token_file` read it, and `loader` reads a microbatch of
samples. `ledger` digests what was actually read, and `pack` makes token files from text. Names are loaded on first use:
`import raysharded.data` loads neither numpy nor pyarrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# `pack` is not exported: the name would be the function before `raysharded.data.pack` is imported, and the module
# after.
_EXPORTS = {
    "Bucketed": "raysharded.data.bucketed",
    "Dataset": "raysharded.data.dataset",
    "DatasetPart": "raysharded.data.parts",
    "padded": "raysharded.data.bucketed",
    "TokenDataset": "raysharded.data.dataset",
    "LedgerReport": "raysharded.data.ledger",
    "ReadRecorder": "raysharded.data.ledger",
    "ShardedItems": "raysharded.data.streams.sharded_items",
    "StepReads": "raysharded.data.ledger",
    "Stream": "raysharded.data.streams.stream",
    "StreamSource": "raysharded.data.streams.source",
    "Loader": "raysharded.data.loader",
    "Microbatch": "raysharded.data.loader",
    "Mixture": "raysharded.data.mixtures.mixture",
    "PackedDataset": "raysharded.data.packed.packed_dataset",
    "MicrobatchLoader": "raysharded.data.loader",
    "positions_of_microbatch": "raysharded.data.order",
    "positions_of_step": "raysharded.data.order",
    "sample_ids": "raysharded.data.order",
    "split": "raysharded.data.parts",
}

if TYPE_CHECKING:
    from raysharded.data.bucketed import Bucketed as Bucketed, padded as padded
    from raysharded.data.dataset import Dataset as Dataset, TokenDataset as TokenDataset
    from raysharded.data.ledger import (
        LedgerReport as LedgerReport,
        ReadRecorder as ReadRecorder,
        StepReads as StepReads,
    )
    from raysharded.data.loader import Loader as Loader, Microbatch as Microbatch, MicrobatchLoader as MicrobatchLoader
    from raysharded.data.mixtures.mixture import Mixture as Mixture
    from raysharded.data.order import (
        positions_of_microbatch as positions_of_microbatch,
        positions_of_step as positions_of_step,
        sample_ids as sample_ids,
    )
    from raysharded.data.packed.packed_dataset import PackedDataset as PackedDataset
    from raysharded.data.parts import DatasetPart as DatasetPart, split as split
    from raysharded.data.streams.sharded_items import ShardedItems as ShardedItems
    from raysharded.data.streams.source import StreamSource as StreamSource
    from raysharded.data.streams.stream import Stream as Stream

__all__ = [
    "Bucketed",
    "Dataset",
    "DatasetPart",
    "LedgerReport",
    "Loader",
    "Microbatch",
    "MicrobatchLoader",
    "Mixture",
    "PackedDataset",
    "ReadRecorder",
    "ShardedItems",
    "StepReads",
    "Stream",
    "StreamSource",
    "TokenDataset",
    "padded",
    "positions_of_microbatch",
    "positions_of_step",
    "sample_ids",
    "split",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'raysharded.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__

"""Layouts of the training state as pure values: holders of all bytes, and plans to move them. NumPy only."""

from raysharded.layout.boxes import Box, intersect, subtract
from raysharded.layout.fingerprint import combine, digest, partial
from raysharded.layout.mesh import Mesh
from raysharded.layout.parity import Parity, Rebuild, block_bytes, parity_of, part_range, survives
from raysharded.layout.placement.node_spread import (
    count_neighbours,
    fewest_neighbours,
    keep_apart,
    keep_together,
    spared_first,
    spread_out,
)
from raysharded.layout.placement.overlaps import count_wire_bytes
from raysharded.layout.placement.rank_order import order_workers
from raysharded.layout.recovery import Held, Recoverable, is_complete, recoverable
from raysharded.layout.reshard.plan import (
    MIRROR_BUFFER,
    SNAPSHOT_BUFFER,
    STORAGE,
    Copy,
    Medium,
    Missing,
    Plan,
    Target,
    has_mirrors,
    keeper_of,
    mirror_of,
)
from raysharded.layout.reshard.planner import make_plan
from raysharded.layout.sharding import ALIGNMENT, Piece, ShardMap, Share, row_range, shard_map
from raysharded.layout.state import ITEM_BYTES, StateSpec, TensorSpec, possible_degree, strips_of, tensor_specs

__all__ = [
    "ALIGNMENT",
    "ITEM_BYTES",
    "MIRROR_BUFFER",
    "SNAPSHOT_BUFFER",
    "STORAGE",
    "Box",
    "Copy",
    "Held",
    "Medium",
    "Mesh",
    "Missing",
    "Parity",
    "Piece",
    "Plan",
    "Rebuild",
    "Recoverable",
    "ShardMap",
    "Share",
    "StateSpec",
    "Target",
    "TensorSpec",
    "block_bytes",
    "combine",
    "count_neighbours",
    "count_wire_bytes",
    "digest",
    "fewest_neighbours",
    "intersect",
    "is_complete",
    "has_mirrors",
    "keep_apart",
    "keep_together",
    "keeper_of",
    "make_plan",
    "mirror_of",
    "order_workers",
    "parity_of",
    "part_range",
    "partial",
    "possible_degree",
    "recoverable",
    "row_range",
    "shard_map",
    "spared_first",
    "spread_out",
    "strips_of",
    "subtract",
    "survives",
    "tensor_specs",
]

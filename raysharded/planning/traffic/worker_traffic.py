"""Bytes that a worker sends per step, by purpose and by link. Pure.

An all-gather or an all-reduce sends as much as a ring, the minimum of any algorithm: (n-1) shards, and 2 (n-1)/n of the
tensor (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, J. Parallel Distrib. Comput. 69, 2009). In a ring
over nodes one worker per node sends to another node; an all-to-all sends equally to every worker. Gradients are added
inside a node before they go to another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raysharded.layout import Mesh
from raysharded.planning.memory.footprint import (
    Setting,
    local_setting,
    parity_block_bytes,
    parity_for,
    require_degree,
    snapshot_bytes,
)
from raysharded.planning.memory.partial_sums import own_sums, schedule_of
from raysharded.planning.memory.units import UnitBytes, kept_units, unit_bytes
from raysharded.planning.trace import OUTSIDE
from raysharded.planning.traffic.intra_host import Sent, is_adding, sent_in_group

KINDS = ("all_gather", "reduction", "replicas", "tensor", "mirror", "agreement")
OVERLAPPED = ("all_gather", "reduction", "mirror")
"""Kinds of traffic that overlap with computation."""
AGREEMENT_WORDS = 118
"""int64 words of the agreement but for the sums: flags, digits of the norm, digests of reads and of used parameters,
counts."""
SUM_WORDS = 9
"""int64 words of an exact sum: the loss and its weight, and each metric and its weight."""
_WORD_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that one worker sends per step."""

    sent: Mapping[str, int]
    """Kind -> bytes."""
    between: Mapping[str, int]
    """Kind -> the part that goes to other nodes, averaged over a node's workers."""

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    @property
    def total_between(self) -> int:
        """Bytes to other nodes."""
        return sum(self.between.values())


def worker_traffic(
    setting: Setting, layout: Mesh, *, workers_per_node: int = 1, rank: int | None = None, num_metrics: int = 0
) -> Traffic:
    """A worker's traffic in a step; `rank`: in the mesh. None: the maximum, per kind, over the first ranks of the shard
    groups; for reductions that add inside nodes, over all workers.

    `num_metrics`: the number of metrics that the task returns besides the loss. Evaluations, checkpoints and reshards
    are not included. A tensor parallel group without a microbatch in a round is counted as if it had one. Raises
    ConfigError for a mesh whose tensor parallel degree differs from the setting's.
    """
    require_degree(setting, layout)
    data, local = layout.data, local_setting(setting, layout.tensor_of(rank or 0))
    ranks = range(0, data.world_size, data.shards) if rank is None else (layout.data_rank_of(rank),)
    units = unit_bytes(local.shapes, data.shards, local.engine)

    def most(count: Callable[[int], int]) -> int:
        return max(map(count, ranks))

    rounds = most(lambda r: _rounds(local, data, r))
    sent = {
        "all_gather": _all_gather(local, data, units) * rounds,
        "reduction": most(lambda r: _reduction(local, data, units, r)),
        "replicas": most(lambda r: _replicas(local, data, units, r)),
        "tensor": rounds * setting.trace.tensor_bytes if setting.trace else 0,
        "mirror": _mirror(setting, layout, rank or 0),
        "agreement": _agreement(layout, num_metrics),
    }
    spread = _Spread(layout, workers_per_node)
    shares = {
        "all_gather": spread.ring(layout.tensor, data.shards),
        "reduction": spread.pairs(layout.tensor, data.shards),
        "replicas": spread.pairs(layout.shards, layout.replicas),
        "tensor": spread.ring(1, layout.tensor),
        "mirror": float(spread.is_several),  # mirrors are kept on other nodes
        "agreement": spread.ring(1, layout.world_size),
    }
    between = {kind: round(sent[kind] * shares[kind]) for kind in KINDS}
    if setting.engine.reduction == "exact":
        adding = _adding(local, layout, units, spread, rank)
        sent["reduction"], between["reduction"] = adding or (sent["reduction"], between["reduction"])
    return Traffic(sent=sent, between=between)


def _adding(
    setting: Setting, layout: Mesh, units: UnitBytes, spread: _Spread, rank: int | None
) -> tuple[int, int] | None:
    """(bytes sent by one worker, average per worker of its node to other nodes) of the reduction. Without a rank, the
    maximum of each. None if no worker adds for others."""
    cut = ~units.is_replicated
    sums = int(units.sum_chunk[cut].sum())
    leaves = sums if setting.engine.accumulation == "local" else int(units.chunk[cut].sum())
    schedule = schedule_of(layout.data, setting.num_microbatches, setting.engine.accumulation)
    found: list[tuple[int, int]] = []
    for replica in range(layout.replicas) if rank is None else (layout.replica_of(rank),):
        nodes = spread.nodes_of(layout.group(replica)[layout.tensor_of(rank or 0) :: layout.tensor])
        if not is_adding(nodes):
            return None
        sent = sent_in_group(schedule, replica, nodes)

        def between(node: int, of: tuple[Sent, ...] = sent, on: tuple[int, ...] = nodes) -> int:
            here = [each.sums_between * sums for each, other in zip(of, on, strict=True) if other == node]
            return round(sum(here) / len(here))

        found += [
            (each.leaves * leaves + each.sums * sums, between(node)) for each, node in zip(sent, nodes, strict=True)
        ]
    if rank is not None:
        return found[layout.data.shard_of(layout.data_rank_of(rank))]
    return max(each for each, _ in found), max(each for _, each in found)


def _rounds(setting: Setting, layout: Mesh, rank: int) -> int:
    schedule = schedule_of(layout, setting.num_microbatches, setting.engine.accumulation)
    return schedule.num_rounds(layout.replica_of(rank))


def _all_gather(setting: Setting, layout: Mesh, units: UnitBytes) -> int:
    """Bytes in one round: each unit once in forward, and again in backward, except the root and kept units."""
    parts = units.all_gather // layout.shards
    again = set(range(len(parts) - 1)) - kept_units(setting.shapes, setting.engine)
    if setting.trace is not None:  # frozen blocks before the first trainable one have no backward
        again &= {phase.unit for phase in setting.trace.phases if phase.backward and phase.unit != OUTSIDE}
    return (int(parts.sum()) + sum(int(parts[unit]) for unit in again)) * (layout.shards - 1)


def _reduction(setting: Setting, layout: Mesh, units: UnitBytes, rank: int) -> int:
    engine, cut = setting.engine, ~units.is_replicated
    schedule = schedule_of(layout, setting.num_microbatches, engine.accumulation)
    rounds = range(_rounds(setting, layout, rank))
    if engine.reduction == "fast":
        sent = int(units.chunk[cut].sum()) * (1 if engine.accumulation == "local" else len(rounds))
    elif engine.accumulation == "local":
        sent = int(units.sum_chunk[cut].sum()) * len(schedule.sums_of_rank(rank))
    else:
        sent = int(units.chunk[cut].sum()) * sum(schedule.microbatch_of(rank, r) is not None for r in rounds)
    return sent * (layout.shards - 1)


def _replicas(setting: Setting, layout: Mesh, units: UnitBytes, rank: int) -> int:
    """Bytes of a worker's partial sums to the owners of their parts, and of the finished part to all; or an
    all-reduce."""
    sent = 0
    for replicated in (False, True):
        holders = layout.world_size if replicated else layout.replicas
        if holders == 1:
            continue
        if setting.engine.reduction == "fast":
            sent += 2 * _held_gradients(setting, layout, rank, replicated) * (holders - 1) // holders
            continue
        of_kind = units.is_replicated == replicated
        own = own_sums(layout, setting.num_microbatches, setting.engine.accumulation, rank, replicated)
        parts = -(-units.sum_numel // holders) * of_kind
        of_sums = units.sum_chunk // np.maximum(units.sum_numel, 1)
        travels = units.chunk // np.maximum(units.sum_numel, 1)
        sent += int((parts * (own * of_sums + travels)).sum()) * (holders - 1)
    return sent


def _held_gradients(setting: Setting, layout: Mesh, rank: int, replicated: bool) -> int:
    c = setting.shapes.columns
    chosen = c.trainable & (c.replicated == replicated)
    return int((c.held(layout.shards, layout.shard_of(rank)) * c.itemsize)[chosen].sum())


def _mirror(setting: Setting, layout: Mesh, rank: int) -> int:
    if not setting.engine.mirrors or layout.replicas > 1 or layout.shards == 1:
        return 0
    own = snapshot_bytes(setting.shapes, layout.shards, layout.shard_of(rank), layout.tensor)
    parity = parity_for(setting, layout)
    return own if parity is None else own + (parity.m - 1) * parity_block_bytes(setting, layout, parity)


def _agreement(layout: Mesh, num_metrics: int) -> int:
    words = AGREEMENT_WORDS + SUM_WORDS * (1 + num_metrics) * 2
    return 2 * words * _WORD_BYTES * (layout.world_size - 1) // layout.world_size


@dataclass(frozen=True, slots=True)
class _Spread:
    """Placement of workers on nodes: rank r is on node r // workers_per_node."""

    layout: Mesh
    per_node: int

    @property
    def is_several(self) -> bool:
        return self.layout.world_size > self.per_node

    def nodes_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank // self.per_node for rank in ranks)

    def ring(self, stride: int, count: int) -> float:
        """The share of a ring's bytes over `count` ranks `stride` apart that goes to other nodes."""
        nodes = min(count, -(-count * stride // self.per_node))
        return nodes / count if nodes > 1 else 0.0

    def pairs(self, stride: int, count: int) -> float:
        """The share of a worker's bytes to `count` ranks `stride` apart that goes to other nodes."""
        near = min(count, max(1, self.per_node // stride))
        return (count - near) / (count - 1) if count > 1 else 0.0

"""Bytes that a worker sends per step, by what they are for and by link. Pure.

An all-gather or an all-reduce sends what a ring sends, the least that any algorithm can: (n-1) shards, and 2 (n-1)/n of
the tensor (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, J. Parallel Distrib. Comput. 69, 2009). In a
ring over nodes one worker per node sends to another node; an all-to-all sends as much to every worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raysharded.actors.schedule import Schedule
from raysharded.layout import Mesh
from raysharded.planning.layouts import block_of, rounds_per_step
from raysharded.planning.memory import Setting, snapshot_bytes
from raysharded.planning.sums import own_nodes
from raysharded.planning.trace import OUTSIDE
from raysharded.planning.units import unit_bytes

KINDS = ("all_gather", "reduction", "replicas", "mirror", "agreement")
OVERLAPPED = ("all_gather", "reduction", "mirror")
"""What is sent beside the computation."""
AGREEMENT_WORDS = 113
"""int64 words of the agreement that do not depend on the batch: flags, digits of the norm, digest, reads."""
_WORD_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that one worker sends per step: the worker that sends most, which has a microbatch in every round."""

    sent: Mapping[str, int]
    """Kind -> bytes."""
    between: Mapping[str, int]
    """Kind -> how many of them go to other nodes, on the average over a node's workers."""

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    @property
    def total_between(self) -> int:
        """To other nodes."""
        return sum(self.between.values())


def worker_traffic(
    setting: Setting, layout: Mesh, *, workers_per_node: int = 1, rank: int = 0, num_metrics: int = 0
) -> Traffic:
    """What a worker sends in a step; `rank`: of the first replica's shard group.

    `num_metrics`: how many metrics the task's loss gives beside the loss. Evaluations, checkpoints and reshards come on
    top.
    """
    sent = {
        "all_gather": _all_gather(setting, layout),
        "reduction": _reduction(setting, layout, rank),
        "replicas": _replicas(setting, layout),
        "mirror": _mirror(setting, layout, rank),
        "agreement": _agreement(setting, layout, num_metrics),
    }
    spread = _Spread(layout, workers_per_node)
    shares = {
        "all_gather": spread.ring(layout.shards),
        "reduction": spread.pairs(1, layout.shards),
        "replicas": spread.pairs(layout.shards, layout.replicas),
        "mirror": float(spread.is_several),  # mirrors are kept on other nodes
        "agreement": spread.ring(layout.world_size),
    }
    return Traffic(sent=sent, between={kind: round(sent[kind] * shares[kind]) for kind in KINDS})


def _all_gather(setting: Setting, layout: Mesh) -> int:
    """A unit once in forward; once more in backward, but for the root and for those that forward keeps."""
    if layout.shards == 1:
        return 0
    units = unit_bytes(setting.shapes, layout.shards, setting.engine).all_gather // layout.shards
    root = len(units) - 1
    again = set(range(root)) if setting.engine.reshard_after_forward else set()
    if setting.trace is not None:  # frozen blocks before the first trainable one have no backward
        again &= {phase.unit for phase in setting.trace.phases if phase.backward and phase.unit != OUTSIDE}
    per_round = int(units.sum()) + sum(int(units[unit]) for unit in again)
    return per_round * (layout.shards - 1) * rounds_per_step(layout, setting.num_microbatches)


def _reduction(setting: Setting, layout: Mesh, rank: int) -> int:
    if layout.shards == 1:
        return 0
    units = unit_bytes(setting.shapes, layout.shards, setting.engine)
    engine, rounds = setting.engine, rounds_per_step(layout, setting.num_microbatches)
    if engine.reduction == "fast":
        times = 1 if engine.accumulation == "local" else rounds
        return int(units.chunk.sum()) * (layout.shards - 1) * times
    if engine.accumulation == "local" and layout.replicas == 1:
        schedule = Schedule(mode="local", num_microbatches=setting.num_microbatches, mesh=layout)
        own = len(schedule.sums_of_rank(rank))
        return int(units.sum_chunk.sum()) * (layout.shards - 1) * own
    start, stop = block_of(layout, 0, setting.num_microbatches)
    leaves = len(range(start + rank, stop, layout.shards))
    return int(units.chunk.sum()) * (layout.shards - 1) * leaves


def _replicas(setting: Setting, layout: Mesh) -> int:
    """A worker's partial sums to the owners of their parts, and the finished part to all."""
    if layout.replicas == 1:
        return 0
    shard = int(unit_bytes(setting.shapes, layout.shards, setting.engine).sum_chunk.sum())
    nodes = max(own_nodes(layout, setting.num_microbatches, replica) for replica in range(layout.replicas))
    return (nodes + 1) * shard * (layout.replicas - 1) // layout.replicas


def _mirror(setting: Setting, layout: Mesh, rank: int) -> int:
    if not setting.engine.mirrors or layout.replicas > 1 or layout.shards == 1:
        return 0
    return snapshot_bytes(setting.shapes, layout.shards, rank)


def _agreement(setting: Setting, layout: Mesh, num_metrics: int) -> int:
    words = AGREEMENT_WORDS + setting.num_microbatches * (1 + num_metrics) * 2
    return 2 * words * _WORD_BYTES * (layout.world_size - 1) // layout.world_size


@dataclass(frozen=True, slots=True)
class _Spread:
    """How workers lie on nodes: rank r on node r // workers_per_node."""

    layout: Mesh
    per_node: int

    @property
    def is_several(self) -> bool:
        return self.layout.world_size > self.per_node

    def ring(self, size: int) -> float:
        """The share of a ring's bytes over `size` neighbouring ranks that goes to other nodes."""
        nodes = -(-size // self.per_node)
        return nodes / size if nodes > 1 else 0.0

    def pairs(self, stride: int, count: int) -> float:
        """The share of what a worker sends to `count` ranks `stride` apart that goes to other nodes."""
        near = min(count, max(1, self.per_node // stride))
        return (count - near) / (count - 1) if count > 1 else 0.0

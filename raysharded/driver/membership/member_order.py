"""Ranks of the next generation's members: pure decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from raysharded.driver.state.driver_config import DriverConfig
from raysharded.ids import WorkerId
from raysharded.layout import Mesh, StateSpec, keep_together, order_workers, spread_out
from raysharded.protocol.messages import FromMemory, Source

Nodes = Mapping[WorkerId, str]
"""Worker -> node id."""
_NOWHERE = FromMemory(step=0, spec=StateSpec(tensors=()), copies=())
"""A source of which no worker holds anything."""


def distance_of_mirrors(mesh: Mesh, nodes: Nodes) -> int:
    """`Mesh.apart` for a mesh of these workers, in which those of one node follow each other.

    It is the number of workers on the fullest node, in whole tensor parallel groups: a shard and its mirror are then on
    different nodes.
    """
    if mesh.replicas > 1 or mesh.shards == mesh.tensor:
        return 1
    most = max(Counter(nodes.values()).values(), default=1)
    in_groups = -(-most // mesh.tensor) * mesh.tensor
    return in_groups if in_groups < mesh.shards else mesh.tensor


def number_nodes(members: Sequence[WorkerId], nodes: Nodes, mesh: Mesh) -> tuple[int, ...]:
    """A node number for each rank; empty if the numbers would not help.

    They help with several nodes, several workers on one of them, and each node's workers consecutive in each shard
    group.
    """
    names = [nodes.get(member, "") for member in members]
    if "" in names or not 1 < len(set(names)) < len(names):
        return ()
    for replica in range(mesh.replicas):
        of_group = [names[rank] for rank in mesh.group(replica)]
        if len(list(groupby(of_group))) > len(set(of_group)):
            return ()
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return tuple(number[name] for name in names)


def order_members(
    source: Source, workers: frozenset[WorkerId], limits: DriverConfig, nodes: Nodes | None, mesh: Mesh
) -> tuple[WorkerId, ...]:
    """Members of the next generation, by rank: as many of the workers as the mesh has.

    Each tensor parallel group is on one node wherever possible. With several replicas, the workers of each are on one
    node as far as possible. With one replica, the workers of a node follow each other; with `Mesh.apart`, mirrors are
    on other nodes. With parity, the workers of a stripe are on as many nodes as possible. Among such orders the result
    moves the fewest bytes, or with parity nearly so.
    """
    parity, tensor = limits.parity, mesh.tensor
    if parity is None or not parity.protects(mesh):
        return _ordered(source, workers, mesh, limits.mirrors, nodes or {})
    anywhere = _ordered(source, workers, mesh, mirrors=False, nodes=(nodes or {}) if tensor > 1 else {})
    by_leader = {anywhere[first]: anywhere[first : first + tensor] for first in range(0, len(anywhere), tensor)}
    return tuple(
        worker for leader in spread_out([*by_leader], nodes or {}, parity.width) for worker in by_leader[leader]
    )


def choose_members(source: Source, workers: frozenset[WorkerId], mesh: Mesh) -> list[WorkerId]:
    """Members of the next generation, by id: workers that hold state take precedence."""
    holders = _holders(source) if isinstance(source, FromMemory) else frozenset()
    return sorted(sorted(workers, key=lambda worker: (worker not in holders, worker))[: mesh.world_size])


def _holders(source: FromMemory) -> frozenset[WorkerId]:
    needed = [copy.holders for copy in source.copies]
    needed += [ranks for rebuild in source.rebuilds for ranks in (rebuild.holders, rebuild.keepers)]
    return frozenset(holder for ranks in needed for holder in ranks if holder is not None)


def _ordered(
    source: Source, workers: frozenset[WorkerId], mesh: Mesh, mirrors: bool, nodes: Nodes
) -> tuple[WorkerId, ...]:
    in_memory = source if isinstance(source, FromMemory) else _NOWHERE
    holders, chosen = _holders(in_memory), choose_members(source, workers, mesh)
    if in_memory is _NOWHERE and mesh.tensor == 1 and mesh.replicas > 1:
        return _placed(chosen, mesh, nodes)
    return order_workers(
        in_memory.spec,
        in_memory.copies,
        [worker for worker in chosen if worker in holders],
        [worker for worker in chosen if worker not in holders],
        mirrors,
        nodes,
        mesh.replicas,
        tensor=mesh.tensor,
        apart=mesh.apart,
    )


def _placed(workers: Sequence[WorkerId], mesh: Mesh, nodes: Nodes) -> tuple[WorkerId, ...]:
    """Order of workers that hold nothing yet, in several replicas: by their nodes alone."""
    ordered = sorted(workers, key=lambda worker: (nodes.get(worker, ""), worker))
    by_shard = [worker for shard in range(mesh.shards) for worker in ordered[shard :: mesh.shards]]
    return keep_together(by_shard, nodes, mesh.replicas)

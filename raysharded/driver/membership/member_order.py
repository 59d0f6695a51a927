"""Ranks of the next generation's members: pure decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from raysharded.driver.membership.state_source import holders_of
from raysharded.driver.state.changed import replace
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.ids import WorkerId
from raysharded.layout import Mesh, Parity, StateSpec, keep_together, order_workers, spread_out
from raysharded.layout.placement.node_spread import most_together
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
    on other nodes. With parity, the workers of a stripe are on as many nodes as possible: in such an order if that does
    it, at a distance of `Mesh.apart`, otherwise as neighbours. Among such orders the result moves the fewest bytes, or
    with parity nearly so.
    """
    parity, tensor = limits.parity, mesh.tensor
    if parity is None or not parity.protects(mesh):
        return _ordered(source, workers, mesh, limits.mirrors, nodes or {})
    spread = _spread_out(source, workers, parity.width, nodes or {}, mesh)
    if tensor > 1 or mesh.apart == 1:
        return spread
    together = _ordered(source, workers, mesh, mirrors=False, nodes=nodes or {})
    return together if distance_of_stripes(mesh, together, nodes or {}, parity, spread) == mesh.apart else spread


def distance_of_stripes(
    mesh: Mesh, members: Sequence[WorkerId], nodes: Nodes, parity: Parity, spread: Sequence[WorkerId] = ()
) -> int:
    """`Mesh.apart` for a mesh with parity of these members, by rank: the given one if stripes are on enough nodes.

    They are if the workers of each node follow each other, and a stripe has no more of them than with the order
    `spread` and neighbouring ranks; without one: than as these members. Otherwise neighbouring ranks have a stripe.
    With tensor parallelism neighbouring groups have: two columns of ranks may have one group in common.
    """
    if mesh.tensor > 1:
        return mesh.tensor
    near, far = (replace(parity, apart=apart) for apart in (1, mesh.apart))

    def most(order: Sequence[WorkerId], of: Parity) -> int:
        places = [order[of.rank_at(place, mesh.shards)] for place in range(mesh.shards)]
        return most_together(places, nodes, parity.width)

    runs = len(list(groupby(nodes.get(member, "") for member in members)))
    is_in_runs = runs == len({nodes.get(member, "") for member in members})
    return mesh.apart if is_in_runs and most(members, far) <= most(spread or members, near) else 1


def _spread_out(
    source: Source, workers: frozenset[WorkerId], width: int, nodes: Nodes, mesh: Mesh
) -> tuple[WorkerId, ...]:
    """An order in which the neighbouring tensor parallel groups are on different nodes, as far as possible."""
    tensor = mesh.tensor
    anywhere = _ordered(source, workers, mesh, mirrors=False, nodes=nodes if tensor > 1 else {})
    by_leader = {anywhere[first]: anywhere[first : first + tensor] for first in range(0, len(anywhere), tensor)}
    return tuple(worker for leader in spread_out([*by_leader], nodes, width) for worker in by_leader[leader])


def choose_members(source: Source, workers: frozenset[WorkerId], mesh: Mesh) -> list[WorkerId]:
    """Members of the next generation, by id: workers that hold state take precedence."""
    holders = holders_of(source)
    return sorted(sorted(workers, key=lambda worker: (worker not in holders, worker))[: mesh.world_size])


def _ordered(
    source: Source, workers: frozenset[WorkerId], mesh: Mesh, mirrors: bool, nodes: Nodes
) -> tuple[WorkerId, ...]:
    in_memory = source if isinstance(source, FromMemory) else _NOWHERE
    holders, chosen = holders_of(in_memory), choose_members(source, workers, mesh)
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

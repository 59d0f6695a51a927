"""Places workers on Ray's nodes by shard group, or else by tensor parallel group; and keeps actors off some nodes.

Placement groups of Ray cannot follow a membership that changes by single workers: their bundles are fixed. So each
worker is placed by itself, where it completes a group, and elsewhere if there is no room when it comes to that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import ray
from ray._private import state as ray_state
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysharded.ids import WorkerId
from raysharded.ray_backend.node_watch import NodeInfo


def choose_node(free: Mapping[str, int], taken: Mapping[str, int], group_size: int) -> str | None:
    """The node for one more worker; None if no node has room.

    `free`: node id -> workers that it has room for; `taken`: node id -> the run's workers on it. First a node whose
    workers are no whole number of groups, the one that lacks fewest to the next; then, for a new group, one with room
    for all of it, with as few of the run's workers as there can be; then the one with the most room. Ties are broken by
    node id.
    """
    roomy = [node for node, room in free.items() if room > 0]
    begun = [node for node in roomy if taken.get(node, 0) % group_size]
    if begun:
        return min(begun, key=lambda node: (group_size - taken[node] % group_size, node))
    whole = [node for node in roomy if free[node] >= group_size]
    if whole:
        return min(whole, key=lambda node: (taken.get(node, 0), -free[node], node))
    return min(roomy, key=lambda node: (-free[node], node), default=None)


class Placing:
    """Where each worker was sent to. Used by one thread."""

    def __init__(self, group_size: int, needs: Mapping[str, float]) -> None:
        self._group_size, self._needs = group_size, needs
        self._sent: dict[WorkerId, str] = {}
        """Worker -> node id."""

    def strategy(self, worker: WorkerId, there: Mapping[WorkerId, str], unfit: Collection[str]) -> Any:
        """Ray's `scheduling_strategy` for a worker that is about to be started. `there`: worker -> node id of those
        that run; `unfit`: nodes on which it must not be placed. Without groups, or without room, Ray spreads workers.
        """
        if self._group_size == 1:
            return "SPREAD"
        coming = Counter(node for sent, node in self._sent.items() if sent not in there)
        taken = coming + Counter(there.values())
        free = {node: room - coming[node] for node, room in self._room().items() if node not in unfit}
        node = choose_node(free, taken, self._group_size)
        if node is None:
            return "SPREAD"
        self._sent[worker] = node
        return NodeAffinitySchedulingStrategy(node, soft=True)

    def forget(self, worker: WorkerId) -> None:
        """It is gone."""
        self._sent.pop(worker, None)

    def _room(self) -> dict[str, int]:
        """Node id -> how many more workers fit there now."""
        available: dict[str, dict[str, float]] = ray_state.available_resources_per_node()
        return {
            node: min(int(have.get(name, 0.0) / amount + 1e-9) for name, amount in self._needs.items())
            for node, have in available.items()
            if self._needs
        }


_NODE_ID_LABEL = "ray.io/node-id"
"""Every node has it."""


def node_table() -> dict[str, NodeInfo]:
    """The cluster's nodes by id, those that it lost too. Raises what Ray raises."""
    return {
        node["NodeID"]: NodeInfo(host=node["NodeManagerAddress"], port=node["NodeManagerPort"], alive=node["Alive"])
        for node in ray.nodes()
    }


def node_of(actor: ActorHandle[Any]) -> str:
    """The id of the node that an actor is, or was, placed on; empty if it is not known."""
    try:
        # Ray has no public way without its dashboard. The id of no node is all ones.
        node = str(ray_state.actors(actor._actor_id.hex())["Address"]["NodeID"])
        return node if node.strip("f") else ""
    except Exception:  # noqa: BLE001 - it is only told to people and counted: not worth a failure
        return ""


def not_on(nodes: Iterable[str]) -> dict[str, str]:
    """The `label_selector` of an actor that must be placed on none of these nodes; empty for no nodes."""
    names = sorted(nodes)
    return {_NODE_ID_LABEL: f"!in({','.join(names)})"} if names else {}

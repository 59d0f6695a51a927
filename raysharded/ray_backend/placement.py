"""Places workers on Ray's nodes by shard group, or else by tensor parallel group; and keeps actors off some nodes.

Ray's placement groups cannot follow a membership that changes by single workers: their bundles are fixed. So each
worker is placed by itself, where it completes a group, or elsewhere if that node has no free resources by then.
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
from raysharded.ray_backend.peers import gcs


def choose_node(free: Mapping[str, int], taken: Mapping[str, int], group_size: int) -> str | None:
    """The node for one more worker; None if no node has free resources.

    `free`: node id -> number of workers that still fit; `taken`: node id -> number of the run's workers on it.

    First choice is a node whose workers are no whole number of groups, with the fewest missing to the next. Then, for a
    new group, a node on which all of it fits, with as few of the run's workers as possible. Then the node where most
    fit. Ties are broken by node id.
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
    """The node that each worker was sent to. Used by one thread."""

    where = "the cluster"

    def __init__(self, group_size: int, needs: Mapping[str, float]) -> None:
        self._group_size, self._needs = group_size, needs
        self._sent: dict[WorkerId, str] = {}
        """Worker -> node id."""

    def strategy(self, worker: WorkerId, there: Mapping[WorkerId, str], unfit: Collection[str]) -> Any:
        """Ray's `scheduling_strategy` for a worker that is about to be started.

        `there`: worker -> node id of running workers; `unfit`: nodes on which it must not be placed. Without groups, or
        without free resources, Ray spreads workers.
        """
        if self._group_size == 1:
            return "SPREAD"
        coming = Counter(node for sent, node in self._sent.items() if sent not in there)
        taken = coming + Counter(there.values())
        free = {node: room - coming[node] for node, room in self.room().items() if node not in unfit}
        node = choose_node(free, taken, self._group_size)
        if node is None:
            return "SPREAD"
        self._sent[worker] = node
        return NodeAffinitySchedulingStrategy(node, soft=True)

    def forget(self, worker: WorkerId) -> None:
        """Discard a lost worker."""
        self._sent.pop(worker, None)

    def room(self) -> dict[str, int]:
        """Node id -> number of further workers that fit there now."""
        available: dict[str, dict[str, float]] = ray_state.available_resources_per_node()
        return {
            node: min(int(have.get(name, 0.0) / amount + 1e-9) for name, amount in self._needs.items())
            for node, have in available.items()
            if self._needs
        }

    def resources(self) -> tuple[dict[str, float], dict[str, float]]:
        """(the cluster's resources, those that are free now)."""
        return ray.cluster_resources(), ray.available_resources()


_ALIVE = 0
"""State of a living node, in Ray's messages."""
_TABLE_S = 2.0
_NODE_ID_LABEL = "ray.io/node-id"
"""Label that every node has."""


def node_table() -> dict[str, NodeInfo]:
    """The cluster's nodes by id, including lost ones. Raises what Ray raises; also if the GCS does not answer soon."""
    return {
        node_id.hex(): NodeInfo(host=info.node_manager_address, port=info.node_manager_port, alive=info.state == _ALIVE)
        for node_id, info in gcs().get_all_node_info(timeout=_TABLE_S).items()
    }


def node_of(actor: ActorHandle[Any]) -> str:
    """Id of the node that an actor is, was, or may be placed on; empty if unknown."""
    node = str(_record_of(actor).get("Address", {}).get("NodeID", ""))
    return node if node.strip("f") else ""  # the id of no node is all ones


def has_process(actor: ActorHandle[Any]) -> bool:
    """True if an actor has a process, and with it its resources, or had one; it may still be starting."""
    return bool(_record_of(actor).get("Pid"))


def _record_of(actor: ActorHandle[Any]) -> Mapping[str, Any]:
    """Ray's record of an actor; empty if unknown. Ray has no public way without its dashboard."""
    try:
        record: Mapping[str, Any] = ray_state.actors(actor._actor_id.hex())
    except Exception:  # noqa: BLE001 - used for reports and counts only: not worth a failure
        return {}
    return record


def not_on(nodes: Iterable[str]) -> dict[str, str]:
    """The `label_selector` of an actor that must be placed on none of these nodes; empty for no nodes."""
    names = sorted(nodes)
    return {_NODE_ID_LABEL: f"!in({','.join(names)})"} if names else {}

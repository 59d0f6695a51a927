"""What Ray says of its nodes, and how an actor is kept off some of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
from ray._private import state as ray_state
from ray.actor import ActorHandle

from raysharded.driver.node_watch import NodeInfo

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

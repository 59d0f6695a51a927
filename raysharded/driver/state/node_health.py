"""Nodes that fail repeatedly, and are therefore avoided. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TypeAlias

_REASONS_KEPT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """The run's observations of a node."""

    host: str = ""
    """Host name for people; empty if no worker was ever ready there."""
    failures: int = 0
    """Workers lost there or failed to start there; the death of the whole node counts once."""
    reasons: tuple[str, ...] = ()
    """Reasons of the last few failures."""
    dead: bool = False
    avoided: bool = False
    """Whether no new worker is placed there because of failures."""
    drained: bool = False
    """Whether no new worker is placed there because a user drains it."""


Nodes: TypeAlias = Mapping[str, NodeRecord]
"""Records by node id. A node that returns after its death has a new id, and a clean record."""


def seen(nodes: Nodes, node_id: str, host: str) -> Nodes:
    """Record that a worker is ready on a node."""
    known = nodes.get(node_id, NodeRecord())
    if not node_id or (known.host == host and node_id in nodes):
        return nodes
    return {**nodes, node_id: replace(known, host=host)}


def failed(
    nodes: Nodes, node_id: str, reason: str, *, died: bool, limit: int | None
) -> tuple[Nodes, NodeRecord | None]:
    """Record that a worker was lost on a node, or failed to start there; `died`: because the whole node did.

    Also returns the node's record if it is avoided from now on: after `limit` failures, unless it is the only node that
    is left. `node_id` is empty if the worker's node is unknown.
    """
    record = nodes.get(node_id, NodeRecord())
    if not node_id or record.dead:  # the other workers of a node that died are not further failures
        return nodes, None
    record = replace(
        record, failures=record.failures + 1, reasons=(*record.reasons, reason)[-_REASONS_KEPT:], dead=died
    )
    others = any(not (other.avoided or other.drained or other.dead) for name, other in nodes.items() if name != node_id)
    newly = limit is not None and record.failures >= limit and others and not (record.avoided or record.dead)
    record = replace(record, avoided=record.avoided or newly)
    return {**nodes, node_id: record}, record if newly else None


def drained(nodes: Nodes, node_ids: AbstractSet[str]) -> Nodes:
    """Record that these nodes are drained: their workers leave, and none starts there."""
    return {**nodes, **{node_id: replace(nodes.get(node_id, NodeRecord()), drained=True) for node_id in node_ids}}


def is_drained(nodes: Nodes, node_id: str) -> bool:
    return node_id in nodes and nodes[node_id].drained


def is_avoided(nodes: Nodes, node_id: str) -> bool:
    """Whether `avoided` includes the node."""
    return node_id in nodes and (nodes[node_id].avoided or nodes[node_id].drained)


def avoided(nodes: Nodes, doomed: AbstractSet[str] = frozenset()) -> tuple[str, ...]:
    """Ids of the nodes that get no new workers; `doomed` ones too, unless no others are known."""
    failing = {node_id for node_id, record in nodes.items() if record.avoided or record.drained}
    others = any(not record.dead and node_id not in failing | doomed for node_id, record in nodes.items())
    return tuple(sorted(failing | doomed if others else failing))

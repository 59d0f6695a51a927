"""Nodes that fail repeatedly, and are therefore avoided. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

from raysharded.driver.state.changed import replace

_REASONS_KEPT = 3
INCIDENT_S = 30.0
"""Failures on a node within this time of the first one have one cause, and count once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """The run's observations of a node."""

    host: str = ""
    """Host name for people; empty if no worker was ever ready there."""
    failures: int = 0
    """Incidents that counted at the newest one: workers lost there or failed to start there, or the whole node's
    death."""
    reasons: tuple[str, ...] = ()
    """Reasons of the last few incidents."""
    failed_at: tuple[float, ...] = ()
    """Times at which these incidents began."""
    dead: bool = False
    """Whether the whole node is lost. It may come back: it was cut off."""
    lost_at: float = 0.0
    """Time at which a dead node was lost."""
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
    nodes: Nodes, node_id: str, reason: str, at: float, *, died: bool, limit: int | None, window_s: float
) -> tuple[Nodes, NodeRecord | None]:
    """Record that a worker was lost on a node, or failed to start there; `died`: because the whole node did.

    Also returns the node's record if it is avoided from now on: after `limit` incidents within `window_s`, unless it is
    the only node that is left. `node_id` is empty if the worker's node is unknown.
    """
    record = nodes.get(node_id, NodeRecord())
    if not node_id or record.dead:  # the other workers of a node that died are not further failures
        return nodes, None
    begun = _counted(record, at, window_s)
    if not begun or at - begun[-1] >= INCIDENT_S:
        begun = (*begun, at)
        record = replace(record, reasons=(*record.reasons, reason)[-_REASONS_KEPT:])
    record = replace(record, failures=len(begun), failed_at=begun)
    if died:
        record = replace(record, dead=True, lost_at=at)
    newly = limit is not None and len(begun) >= limit and not (record.avoided or record.dead)
    newly = newly and _others(nodes, node_id)
    record = replace(record, avoided=record.avoided or newly)
    return {**nodes, node_id: record}, record if newly else None


def _counted(record: NodeRecord, at: float, window_s: float) -> tuple[float, ...]:
    return tuple(began for began in record.failed_at if at - began < window_s)


def _others(nodes: Nodes, node_id: str) -> bool:
    """Whether workers may be placed on another known node."""
    return any(not (one.avoided or one.drained or one.dead) for name, one in nodes.items() if name != node_id)


def restored(nodes: Nodes, at: float, *, limit: int | None, window_s: float) -> tuple[Nodes, Mapping[str, str]]:
    """The records without verdicts that no longer hold, and node id -> why the node is used again.

    An avoided node is used again if fewer than `limit` of its incidents count, or if no other node is left: then the
    one whose newest incident is the oldest.
    """
    found: dict[str, str] = {}
    for node_id, record in nodes.items():
        counted = len(_counted(record, at, window_s))
        if record.avoided and not record.dead and counted < (limit or 1):
            found[node_id] = f"{counted} of its failures are less than {window_s:.0f} s old"
    nodes = {**nodes, **{node_id: replace(nodes[node_id], avoided=False) for node_id in found}}
    kept = [node_id for node_id, record in nodes.items() if record.avoided and not (record.dead or record.drained)]
    if kept and not _others(nodes, ""):
        first = min(kept, key=lambda node_id: (nodes[node_id].failed_at[-1:], node_id))
        nodes, found = {**nodes, first: replace(nodes[first], avoided=False)}, {**found, first: "no other node is left"}
    return nodes, found


def back(nodes: Nodes, node_id: str) -> Nodes:
    """Record that a node that counted as dead answers again."""
    return {**nodes, node_id: replace(nodes[node_id], dead=False)} if is_dead(nodes, node_id) else nodes


def is_dead(nodes: Nodes, node_id: str) -> bool:
    return node_id in nodes and nodes[node_id].dead


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

"""The driver's verdicts on nodes: lost, avoided, and used again. Handlers of the machine.

A verdict is journaled when it is made and when it is lifted, and rests on evidence: a node that answers again is not
dead, and a node whose failures are old gets workers again. Workers that still wait for a place are then placed anew.
The node of a single failed start is avoided for some seconds, without a verdict.
"""

from __future__ import annotations

from raysharded.display.quantities import count, listing
from raysharded.driver.state import node_health
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, Outcome, Record, StartWorker
from raysharded.driver.state.node_health import NodeRecord
from raysharded.driver.state.state import State
from raysharded.protocol.worker_launcher import NodeBack, NodeLost

_DOOMED_S = 60.0
"""Time past its deadline for which a machine is still expected to disappear soon."""
_ELSEWHERE_S = 10.0
"""Time for which the node of a failed start gets no worker: Ray places the next one elsewhere by then, if it can."""


def count_failure(state: State, node_id: str, reason: str, at: float, *, died: bool = False) -> Outcome:
    """Count a lost worker, or a failed start, against a node. After too many, no new worker is placed there."""
    limits = state.limits
    known, newly = node_health.failed(
        state.nodes,
        node_id,
        reason,
        at,
        died=died,
        limit=limits.max_node_failures,
        window_s=limits.node_failure_window_s,
    )
    state = replace(state, nodes=known)
    if newly is None:
        return state, []
    fields = {
        "node": node_id,
        "host": newly.host,
        "step": state.step,
        "failures": newly.failures,
        "reasons": list(newly.reasons),
    }
    state = replace(state, start_failures=0)  # later failures are on other nodes
    return state, [Record(kind="node_avoided", fields=fields, durable=True)]


def note_failed_start(state: State, node_id: str, at: float) -> State:
    """Place the next workers on other nodes, for a short time: a broken node would fail all of them."""
    return replace(state, failed_starts={**state.failed_starts, node_id: at}) if node_id else state


def on_lost(state: State, event: NodeLost, at: float) -> Outcome:
    """Handle a node that does not answer. Its workers were lost before, each for itself or with the node."""
    state, commands = count_failure(state, event.node_id, event.reason, at, died=True)
    fields = {"node": event.node_id, "host": event.host, "step": state.step, "reason": event.reason}
    return state, [*commands, Record(kind="node_lost", fields=fields, durable=True)]


def on_back(state: State, event: NodeBack, at: float) -> Outcome:
    """Handle a node that answers again."""
    record = state.nodes.get(event.node_id, NodeRecord())
    fields = {"node": event.node_id, "host": event.host, "step": state.step, "after_s": at - record.lost_at}
    return replace(state, nodes=node_health.back(state.nodes, event.node_id)), [
        Record(kind="node_back", fields=fields, durable=True)
    ]


def review(state: State, at: float) -> Outcome:
    """Lift the verdicts that no longer hold, and place workers that wait for a place anew."""
    recent = {node_id: failed_at for node_id, failed_at in state.failed_starts.items() if at < failed_at + _ELSEWHERE_S}
    is_over = len(recent) < len(state.failed_starts)
    if not is_over and not any(record.avoided for record in state.nodes.values()):
        return state, []
    limits = state.limits
    nodes, found = node_health.restored(
        state.nodes, at, limit=limits.max_node_failures, window_s=limits.node_failure_window_s
    )
    if not found and not is_over:
        return state, []
    state = replace(state, nodes=nodes, failed_starts=recent)
    commands: list[Command] = []
    for node_id, reason in found.items():
        fields = {"node": node_id, "host": nodes[node_id].host, "step": state.step, "reason": reason}
        commands.append(Record(kind="node_allowed", fields=fields, durable=True))
    avoid = to_avoid(state, at)
    return state, [*commands, *(StartWorker(worker=worker, avoid=avoid) for worker in sorted(state.starting))]


def text(state: State) -> str:
    """A sentence about the nodes that get no new workers because of failures; empty without any. Any thread."""
    avoided = [node for node, record in state.nodes.items() if record.avoided and not (record.drained or record.dead)]
    names = sorted(f"{state.nodes[node].host or '?'} ({node[:12]})" for node in avoided)
    if not names or state.limits.max_node_failures is None:
        return ""
    return f"no worker is placed on {listing(names)}: {count(state.limits.max_node_failures, 'failure')}"


def to_avoid(state: State, at: float) -> tuple[str, ...]:
    """Ids of the nodes that get no new workers now."""
    doomed = {node for node, by in state.terminating_nodes.items() if at < by + _DOOMED_S}
    return node_health.avoided(state.nodes, doomed | state.failed_starts.keys())

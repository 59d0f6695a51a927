"""Why what somebody asks of a run cannot be had: one sentence each, empty if it can. Pure; any thread may ask."""

from __future__ import annotations

import math

from raysharded.driver.state import Phase, State
from raysharded.obs.units import listing

_LEAST_OF_AN_ID = 8
"""So many characters of a node's id are enough to name it."""


def pause_refusal(state: State) -> str:
    """Why the run cannot be paused."""
    if state.phase is Phase.OVER:
        return "the run is over"
    last = state.limits.max_steps
    if state.phase is Phase.CLOSING or state.step >= last:
        return f"the run has done its last step, {last}, and ends"
    return ""


def resume_refusal(state: State) -> str:
    """Why the run cannot be told to go on; one that is not paused just does."""
    return "the run is over" if state.phase is Phase.OVER else ""


def resize_refusal(state: State, workers: int) -> str:
    """Why the run cannot have so many workers."""
    if state.phase is Phase.OVER:
        return "the run is over"
    least, most = state.limits.min_workers, state.limits.most_workers
    if least <= workers <= most:
        return ""
    return (
        f"{workers} workers are asked for, and the run may have {least} to {most}. Ask for a number between, or start "
        "it again with another ScalingConfig.num_workers."
    )


def drain_refusal(state: State, node: str, within_s: float) -> str:
    """Why workers cannot be told to leave this node within this time."""
    if state.phase is Phase.OVER:
        return "the run is over"
    if not (math.isfinite(within_s) and within_s >= 0):
        return f"workers are to leave within {within_s} s: give a number of seconds that is not negative"
    if nodes_named(state, node):
        return ""
    there = {facts.node_id: facts.node for worker, facts in state.facts.items() if worker in state.ready}
    names = sorted({f"{host} ({node_id})" if host != node_id else host for node_id, host in there.items()})
    return f"no worker of the run is on node {node!r}; " + (
        f"there are some on {listing(names)}" if names else "it has none"
    )


def nodes_named(state: State, node: str) -> frozenset[str]:
    """The ids of the nodes with workers that this id, or its beginning, or the name of a host means."""
    found = set()
    for worker, facts in state.facts.items():
        begins = len(node) >= _LEAST_OF_AN_ID and facts.node_id.startswith(node)
        if worker in state.ready and facts.node_id and (begins or node in (facts.node_id, facts.node)):
            found.add(facts.node_id)
    return frozenset(found)

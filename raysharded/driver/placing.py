"""On which node a worker is started, so that shard groups (or else tensor parallel groups) are together and apart
from each other. Pure.

Placement groups of Ray cannot follow a membership that changes by single workers: their bundles are fixed. So each
worker is placed by itself, where it completes a group, and elsewhere if there is no room when it comes to that.
"""

from __future__ import annotations

from collections.abc import Mapping


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

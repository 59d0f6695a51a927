"""Places workers on Ray's nodes by shard group, or else by tensor parallel group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from ray._private import state as ray_state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysharded.driver.placing import choose_node
from raysharded.ids import WorkerId


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

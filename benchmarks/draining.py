"""Notice to a Ray node that it will be taken away, as clouds give it. For raysharded and for Ray Train."""

from __future__ import annotations

import time
from typing import Any

import ray

_PREEMPTION = 2
"""Ray's DRAIN_NODE_REASON_PREEMPTION."""


def drain(node_id: str, notice_s: float) -> None:
    """Give a node of the cluster to which this process is connected so many seconds. Raises RuntimeError if refused."""
    by_ms = time.time_ns() // 1_000_000 + int(1000 * notice_s)
    gcs: Any = ray._private.worker.global_worker.gcs_client  # type: ignore[attr-defined]  # it has no public name
    accepted, why = gcs.drain_node(node_id, _PREEMPTION, "preempted", by_ms)
    if not accepted:
        raise RuntimeError(f"node {node_id} was not drained: {why}")

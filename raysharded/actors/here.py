"""Where this process runs."""

from __future__ import annotations

import platform
import sys


def node_id() -> str:
    """The id (hex) of the Ray node that this process runs on; outside Ray the host's name."""
    ray = sys.modules.get("ray")  # Ray has loaded itself where it matters; a plain process must not wait for that
    if ray is None or not ray.is_initialized():
        return platform.node()
    return str(ray.get_runtime_context().get_node_id())

"""Driver actors among a cluster's actors. Knows Ray."""

from __future__ import annotations

from typing import Any

import ray

from raysharded.protocol.session import run_digest
from raysharded.ray_backend.peers import NAMESPACE


def host_name(name: str, url: str) -> str:
    """Name of a run's host among the cluster's actors."""
    return f"driver-{run_digest(url)}-{name}"


def host_of(actor_name: str) -> Any:
    """The host's actor, also while Ray restarts it; None if there is none."""
    try:
        return ray.get_actor(actor_name, namespace=NAMESPACE)
    except ValueError:
        return None

"""gloo groups that are connected as soon as they are made, and how torch takes one for a group of its own."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import torch.distributed as dist

from raysharded.actors.peer_waits import waits_for_peers

BACKEND = "raysharded_gloo"
"""Of torch's groups that are to be the one that was handed over."""


class _HandedOver(threading.local):
    group: Any = None

    def __call__(self, store: object, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        return self.group


_handed_over = _HandedOver()
dist.Backend.register_backend(BACKEND, _handed_over, devices=["cpu"])


def hand_over(group: Any) -> None:
    """Let the next groups that torch makes in this thread be this one; None: let go of it."""
    _handed_over.group = group


@waits_for_peers
def connect(
    store: Any, rank: int, size: int, address: str, connect_timeout_s: float, timeout: datetime.timedelta
) -> Any:
    """A gloo group, connected to all members; its time-out is another while it connects. `address`: this machine's."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = datetime.timedelta(seconds=connect_timeout_s)
    group = dist.ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(timeout)
    return group

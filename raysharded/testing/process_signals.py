"""Signals to processes, here and on the other nodes of the Ray cluster that this process is connected to."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import threading
from typing import Any

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "slow": signal.SIGSTOP, "term": signal.SIGTERM}
_REMOTE_TIMEOUT_S = 10.0


class Signals:
    """Sends signals; continues processes that it stopped temporarily, at the latest when closed. One thread."""

    def __init__(self) -> None:
        self._paused: list[tuple[threading.Timer, str, int]] = []

    def send(self, node: str, pid: int, kind: str, seconds: float | None = None) -> bool:
        """Send kill, stop, term or slow to a process on the node with that host name; True if the process existed."""
        if not _send(node, pid, _SIGNALS[kind]):
            return False
        if kind == "slow":
            timer = threading.Timer(seconds or 0.0, _send, (node, pid, signal.SIGCONT))
            timer.daemon = True
            self._paused.append((timer, node, pid))
            timer.start()
        return True

    def close(self) -> None:
        """Continue all processes that are still stopped temporarily."""
        for timer, node, pid in self._paused:
            if timer.is_alive():
                timer.cancel()
                _send(node, pid, signal.SIGCONT)


def _send(node: str, pid: int, number: int) -> bool:
    if node == platform.node():
        return send_here(pid, number)
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ids = [found["NodeID"] for found in ray.nodes() if found["Alive"] and found["NodeManagerHostname"] == node]
    if not ids:
        return False
    where: Any = NodeAffinitySchedulingStrategy(ids[0], soft=False)
    sent = ray.remote(send_here).options(num_cpus=0, scheduling_strategy=where, max_retries=0).remote(pid, number)
    with contextlib.suppress(ray.exceptions.RayError):  # the node is lost
        return bool(ray.get(sent, timeout=_REMOTE_TIMEOUT_S))
    return False


def send_here(pid: int, number: int) -> bool:
    """Send a signal to a process on this machine; True if it existed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False

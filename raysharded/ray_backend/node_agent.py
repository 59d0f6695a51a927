"""A node's agent: one tiny actor per node with workers. It loads no torch, so that it is there at once.

Ray ends an actor by asking its process, which takes seconds if that is stopped; the agent signals it. On the one node
of a Ray that the driver started, the driver is its own agent.
"""

from __future__ import annotations

import os
import time

from raysharded.actors.process.os_processes import kill_process, start_ticks

_LOOK_EVERY_S = 0.02


class Agent:
    """Acts on the processes of its node."""

    def kill(self, pid: int, started: int) -> bool:
        """End the process now, also a stopped one: the one that has this id and `started` then (see
        `raysharded.actors.process.os_processes.start_ticks`), no other. False if it was gone."""
        return kill_process(pid, started)

    def kill_after(self, pid: int, started: int, seconds: float) -> bool:
        """Let the process end by itself, and end it if it is there after so many seconds. Whether that was needed."""
        deadline = time.monotonic() + seconds
        while start_ticks(pid) == started:
            if time.monotonic() >= deadline:
                return kill_process(pid, started)
            time.sleep(_LOOK_EVERY_S)
        return False

    def pid(self) -> int:
        """Of the agent itself; answers as soon as it is there."""
        return os.getpid()

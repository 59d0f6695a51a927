"""A node's agent: one tiny actor per node with workers. It loads no torch, so it is available at once.

Ray ends an actor through its own process, which takes seconds if that is stopped; the agent signals it. On the only
node of a Ray that the driver started, the driver is its own agent.
"""

from __future__ import annotations

import os
import time

from raysharded.actors.process.death_watch import DeathWatch
from raysharded.actors.process.os_processes import kill_process, start_ticks
from raysharded.protocol.death import Death

_LOOK_EVERY_S = 0.02


class Agent:
    """Acts on the processes of its node."""

    def __init__(self) -> None:
        self._deaths = DeathWatch()

    def kill(self, pid: int, started: int) -> bool:
        """End the process now, even a stopped one. False if it had exited.

        `started` (`raysharded.actors.process.os_processes.start_ticks`) ensures that no other process with this id is
        ended.
        """
        return kill_process(pid, started)

    def kill_after(self, pid: int, started: int, seconds: float) -> bool:
        """Let the process exit by itself, or end it after `seconds`. Returns whether that was needed."""
        deadline = time.monotonic() + seconds
        while start_ticks(pid) == started:
            if time.monotonic() >= deadline:
                return kill_process(pid, started)
            time.sleep(_LOOK_EVERY_S)
        return False

    def watch(self, pid: int, started: int, device: str = "") -> bool:
        """Watch a worker of this node and its GPU, to explain its death. False if it cannot be watched."""
        return self._deaths.watch(pid, started, device)

    def explain(self, pid: int) -> Death | None:
        """The cause of a watched worker's death; waits a moment for its end. None if it is not known."""
        return self._deaths.explain(pid)

    def close(self) -> None:
        """End all watches."""
        self._deaths.close()

    def pid(self) -> int:
        """Process id of the agent; answers as soon as the agent runs."""
        return os.getpid()

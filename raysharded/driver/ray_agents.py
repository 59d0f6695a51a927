"""The agents of the nodes that workers run on, as Ray actors; and `ray.kill` without waiting for it."""

from __future__ import annotations

import contextlib
import threading
from queue import SimpleQueue
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class Agents:
    """One `raysharded.actors.agent.Agent` on each node that was asked for. One thread; nothing here waits."""

    def __init__(self) -> None:
        from raysharded.actors.agent import Agent

        self._actor_class = ray.remote(Agent)
        self._agents: dict[str, ActorHandle[Any]] = {}
        self._kills: list[ray.ObjectRef[Any]] = []
        """Those that may still be on their way."""

    def ensure(self, node_id: str) -> None:
        """Have an agent on this node; one that dies is started again."""
        if node_id not in self._agents:
            options = self._actor_class.options(
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            self._agents[node_id] = cast("ActorHandle[Any]", options.remote())

    def forget(self, node_id: str) -> None:
        """The node is gone, and its agent with it."""
        self._agents.pop(node_id, None)

    def kill(self, node_id: str, pid: int, started: int) -> None:
        """Have a process of this node ended now, if the node has an agent."""
        agent = self._agents.get(node_id)
        if agent is not None:
            _, self._kills = ray.wait(self._kills, num_returns=len(self._kills), timeout=0) if self._kills else ([], [])
            self._kills.append(agent.kill.remote(pid, started))

    def close(self, within_s: float) -> None:
        """End the agents, after what they were told to kill: waits up to `within_s` for it."""
        with contextlib.suppress(RayError):
            if self._kills:
                ray.wait(self._kills, num_returns=len(self._kills), timeout=within_s)
        for agent in self._agents.values():
            with contextlib.suppress(RayError):
                ray.kill(agent, no_restart=True)
        self._agents, self._kills = {}, []


class Killing:
    """Calls `ray.kill` in a thread of its own: it waits for an answer of the cluster, which may take its time."""

    def __init__(self) -> None:
        self._actors: SimpleQueue[ActorHandle[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def kill(self, actor: ActorHandle[Any]) -> None:
        """End an actor soon; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="raysharded ray.kill", daemon=True)
            self._thread.start()
        self._actors.put(actor)

    def close(self, within_s: float) -> None:
        """Wait up to `within_s` until all that was asked for is done."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._actors.put(None)
            thread.join(within_s)

    def _run(self) -> None:
        while (actor := self._actors.get()) is not None:
            with contextlib.suppress(Exception):  # it is dead, or Ray is gone
                ray.kill(actor, no_restart=True)

"""The ends of workers: agents on their nodes, as Ray actors, signal them and know what they died of."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysharded.ids import WorkerId
from raysharded.protocol.death import Death, DeathExplained
from raysharded.protocol.messages import WorkerInfo
from raysharded.protocol.worker_launcher import LeadershipCheck
from raysharded.ray_backend.peers import GROUP

WAITING = "waiting"
"""Concurrency group of the agent's waiting calls, so that an immediate kill waits for none of them."""
_WAIT_AT_ONCE = 8
_ENDS_WITHIN_S = 1.0
"""A process that does not exit this soon on Ray's request is stopped or stuck: a signal ends it."""


class Agents:
    """One `raysharded.ray_backend.node_agent.Agent` on each requested node.

    Any thread may call `kill`; one thread calls the rest. Only `close` waits.
    """

    def __init__(self) -> None:
        from raysharded.ray_backend.node_agent import Agent

        with_groups: Any = ray.remote(concurrency_groups={WAITING: _WAIT_AT_ONCE})  # type: ignore[call-overload]  # it has them
        self._actor_class = with_groups(Agent)
        self._agents: dict[str, ActorHandle[Any]] = {}
        self._lock = threading.Lock()
        """Guards the list below."""
        self._kills: list[ray.ObjectRef[Any]] = []
        """Kills that may still be on their way."""
        self._asked: dict[ray.ObjectRef[Any], WorkerId] = {}
        """Questions for the causes of deaths."""

    def ensure(self, node_id: str) -> None:
        """Ensure that an agent runs on this node; Ray restarts one that dies."""
        if node_id not in self._agents:
            options = self._actor_class.options(
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            agent = cast("ActorHandle[Any]", options.remote())
            agent.pid.remote()  # an actor's first call takes a third of a second of CPU: not when there is one to kill
            self._agents[node_id] = agent

    def forget(self, node_id: str) -> None:
        """Discard the agent of a node that is lost."""
        self._agents.pop(node_id, None)

    def kill(self, node_id: str, pid: int, started: int, *, after_s: float = 0.0) -> None:
        """End a process of this node, if the node has an agent: now, or after `after_s` if it still runs."""
        agent = self._agents.get(node_id)
        if agent is None:
            return
        with self._lock:
            _, self._kills = ray.wait(self._kills, num_returns=len(self._kills), timeout=0) if self._kills else ([], [])
            if after_s:
                waiting: Any = agent.kill_after.options(concurrency_group=WAITING)
                self._kills.append(waiting.remote(pid, started, after_s))
            else:
                self._kills.append(agent.kill.remote(pid, started))

    def watch(self, node_id: str, pid: int, started: int, device: str = "") -> None:
        """Have a worker and its GPU watched by its node's agent."""
        if node_id in self._agents:
            self._agents[node_id].watch.remote(pid, started, device)

    def ask_cause(self, worker: WorkerId, node_id: str, pid: int) -> None:
        """Request the cause of a lost worker's death; `causes` has the answer."""
        if node_id in self._agents:
            waiting: Any = self._agents[node_id].explain.options(concurrency_group=WAITING)
            self._asked[waiting.remote(pid)] = worker

    def causes(self) -> list[tuple[WorkerId, Death]]:
        """The answers since the last call. Does not wait."""
        if not self._asked:
            return []
        done, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        found = []
        for ref in done:
            worker = self._asked.pop(ref)
            with contextlib.suppress(RayError):  # its node is lost
                death = ray.get(ref)
                if death is not None:
                    found.append((worker, death))
        return found

    def close(self, within_s: float) -> None:
        """End the agents after their pending kills; waits up to `within_s` for these."""
        with contextlib.suppress(RayError):
            if self._kills:
                ray.wait(self._kills, num_returns=len(self._kills), timeout=within_s)
        for agent in self._agents.values():
            with contextlib.suppress(RayError):
                ray.kill(agent, no_restart=True)
        self._agents, self._kills = {}, []


class OwnNode:
    """Replacement for `Agents`, with the same methods, under a Ray that this process started on this machine.

    The process signals workers itself: no agent process waits while they train.
    """

    def __init__(self) -> None:
        from raysharded.ray_backend.node_agent import Agent

        self._agent = Agent()
        self._waiting: list[threading.Thread] = []
        self._causes: SimpleQueue[tuple[WorkerId, Death]] = SimpleQueue()

    def ensure(self, node_id: str) -> None:
        """Do nothing: the node has this process."""

    def forget(self, node_id: str) -> None:
        """Do nothing: this process would be lost with the node."""

    def kill(self, node_id: str, pid: int, started: int, *, after_s: float = 0.0) -> None:
        """End a process: now, or after `after_s` if it still runs."""
        if not after_s:
            self._agent.kill(pid, started)
            return
        self._begin(partial(self._agent.kill_after, pid, started, after_s), "kill")

    def watch(self, node_id: str, pid: int, started: int, device: str = "") -> None:
        """Watch a worker and its GPU."""
        self._agent.watch(pid, started, device)

    def ask_cause(self, worker: WorkerId, node_id: str, pid: int) -> None:
        """Find out what a lost worker died of; `causes` has the answer."""
        self._begin(partial(self._explain, worker, pid), "death")

    def _begin(self, work: Callable[[], object], name: str) -> None:
        self._waiting = [thread for thread in self._waiting if thread.is_alive()]
        thread = threading.Thread(target=work, name=f"raysharded {name}", daemon=True)
        thread.start()
        self._waiting.append(thread)

    def _explain(self, worker: WorkerId, pid: int) -> None:
        death = self._agent.explain(pid)
        if death is not None:
            self._causes.put((worker, death))

    def causes(self) -> list[tuple[WorkerId, Death]]:
        """The answers since the last call. Does not wait."""
        found = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._causes.get_nowait())
        return found

    def close(self, within_s: float) -> None:
        """Wait up to `within_s` for the delayed kills and the causes, and end the watches."""
        deadline = time.monotonic() + within_s
        for thread in self._waiting:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._agent.close()


class Aside:
    """Runs work in order in a background thread: `ray.kill`, for example, waits for the cluster's answer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], object]) -> None:
        """Run `work` soon; returns at once. Its exceptions are ignored. Any thread."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"raysharded {self._name}", daemon=True)
                self._thread.start()
        self._work.put(work)

    def close(self, within_s: float) -> None:
        """Wait up to `within_s` until all work is done."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join(within_s)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            with contextlib.suppress(Exception):  # the actor is dead, or Ray has shut down
                work()


class WorkerEnds:
    """Ends workers' actors, and explains the deaths of others. One thread; only `close` waits."""

    def __init__(self, *, owns_cluster: bool) -> None:
        self._owns_cluster = owns_cluster
        self._agents: Agents | OwnNode = OwnNode() if owns_cluster else Agents()
        self._killing, self._doubts = Aside("ray.kill"), Aside("doubts")
        self._lost: dict[WorkerId, tuple[bool, str]] = {}
        """Lost workers whose cause was requested: (whether Ray ended them, node)."""
        self._unheard: list[ray.ObjectRef[Any]] = []

    def watch(self, facts: WorkerInfo) -> None:
        """Watch a worker that is ready, on its node."""
        self._agents.ensure(facts.node_id)
        self._agents.watch(facts.node_id, facts.pid, facts.started, facts.device)

    def forget_node(self, node_id: str) -> None:
        self._agents.forget(node_id)

    def end(
        self,
        actor: ActorHandle[Any],
        facts: WorkerInfo | None,
        leadership: LeadershipCheck | None,
        epoch: int,
        *,
        at_once: bool,
    ) -> None:
        """End a worker, unless another driver leads the run by now; then request that it exits.

        `epoch`: the driver's own. `at_once`: without a moment to exit in order.
        """
        if self._owns_cluster or leadership is None or leadership.is_sure():
            self._end(actor, facts, at_once=at_once)
        else:  # storage may be slow to show who leads the run: do not wait
            self._doubts.do(partial(self._end_if_ours, leadership, actor, facts, epoch, at_once=at_once))

    def _end(self, actor: ActorHandle[Any], facts: WorkerInfo | None, *, at_once: bool) -> None:
        """Signal the process through its agent, then end the actor through Ray.

        Ray alone may take seconds for a stopped process; the agent's signal looks like a fault to Ray, which reports
        it.
        """
        if facts is not None:
            self._agents.kill(facts.node_id, facts.pid, facts.started, after_s=0.0 if at_once else _ENDS_WITHIN_S)
        self._killing.do(partial(ray.kill, actor, no_restart=True))

    def _end_if_ours(
        self,
        leadership: LeadershipCheck,
        actor: ActorHandle[Any],
        facts: WorkerInfo | None,
        epoch: int,
        *,
        at_once: bool,
    ) -> None:
        if leadership.may_act():
            self._end(actor, facts, at_once=at_once)
        else:  # if it obeys another driver by now, it refuses
            self._unheard.append(actor.leave.options(concurrency_group=GROUP).remote(epoch))

    def explain(self, worker: WorkerId, facts: WorkerInfo, *, by_ray: bool) -> None:
        """Find out what a lost worker died of. `by_ray`: whether Ray reports that it ended it."""
        self._lost[worker] = (by_ray, facts.node_id)
        self._agents.ask_cause(worker, facts.node_id, facts.pid)

    def explained(self, dead_nodes: Container[str]) -> list[DeathExplained]:
        """The causes found since the last call. Workers of dead nodes were ended from outside."""
        found = []
        for worker, death in self._agents.causes():
            outside, node_id = self._lost.pop(worker, (True, ""))
            outside = outside or node_id in dead_nodes
            found.append(DeathExplained(worker=worker, death=replace(death, from_outside=outside)))
        return found

    def close(self, within_s: float) -> None:
        """Wait until the ends that were begun are done: about `within_s` each for doubts, kills and agents."""
        self._doubts.close(within_s)
        self._killing.do(partial(self._agents.close, within_s))
        self._killing.close(2 * within_s)

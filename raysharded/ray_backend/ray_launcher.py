"""Workers as Ray actors. Together with `trainer`, the only code of the driver's side that knows Ray."""

from __future__ import annotations

import math
import time
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from raysharded.config import ScalingConfig
from raysharded.ids import WorkerId
from raysharded.protocol.job import Job
from raysharded.protocol.messages import WorkerInfo
from raysharded.protocol.session import DriverSession, FoundWorkers, job_identity, run_digest
from raysharded.protocol.worker_launcher import (
    GcsHealth,
    Happened,
    LeadershipCheck,
    NodeBack,
    NodeLost,
    Reply,
    WorkerLost,
    WorkersOfAnotherVersion,
)
from raysharded.ray_backend import adoption, other_versions
from raysharded.ray_backend.agents import WorkerEnds
from raysharded.ray_backend.bundles import places
from raysharded.ray_backend.capacity import needs_of, shortage_text, warn_of_different_gpus
from raysharded.ray_backend.death_causes import cause_of_death, is_from_outside
from raysharded.ray_backend.drain_watch import DrainWatch
from raysharded.ray_backend.node_watch import NodeWatch
from raysharded.ray_backend.peers import (
    GROUP,
    GROUP_SIZE,
    NAMESPACE,
    Leases,
    RayPeers,
    gcs,
    gcs_answers,
    gcs_limit_s,
    name_of,
)
from raysharded.ray_backend.placement import has_process, node_of, node_table, not_on
from raysharded.rendezvous.server import RendezvousStore

_CONCURRENT_CALLS = 16
"""Concurrent calls of a worker. One waits for notices; those of earlier drivers may wait for a notice or a save."""
_LAST_KILLS_S = 5.0
"""Longest wait at the end of a run until its workers have received their kills."""
_GCS_TIMEOUT_S = 5.0
_GCS_AT_ONCE_S = 1.0
"""Time in which the GCS must answer before a call to Ray that would wait for it without a limit."""
_LAST_KILLS_WITHOUT_GCS_S = 1.0
_NO_DEADLINE_MS = 2**62
_SLICE_S = 0.05
"""Length of one wait in Ray, which the detection of a dead node cannot interrupt."""


class RayLauncher:
    """Implements `raysharded.protocol.worker_launcher.Launcher` with one Ray actor per worker."""

    def __init__(self, job: Job, scaling: ScalingConfig, *, owns_cluster: bool) -> None:
        from raysharded.orphans.leased_worker import Tenant

        self._scaling = scaling
        self._owns_cluster = owns_cluster
        self._placing = places(scaling, owns_cluster=owns_cluster)
        warn_of_different_gpus(scaling, exact=job.engine.reduction == "exact")
        with_groups: Any = ray.remote(concurrency_groups={GROUP: GROUP_SIZE})  # type: ignore[call-overload]  # it has them
        self._actor_class = with_groups(Tenant)
        self._options: dict[str, Any] = {
            "num_cpus": scaling.cpus_per_worker,
            "num_gpus": 1 if scaling.use_gpu else 0,
            "resources": scaling.resources_per_worker or None,
            "max_concurrency": _CONCURRENT_CALLS,
            "max_restarts": 0,
        }
        self._run, self._identity = run_digest(job.run_url), job_identity(job)
        self._terms: DriverSession | None = None
        self._leadership: LeadershipCheck | None = None
        self._job = ray.put(job)
        self._actors: dict[WorkerId, ActorHandle[Any]] = {}
        self._calls: dict[ray.ObjectRef[Any], tuple[WorkerId, str]] = {}
        self._facts: dict[WorkerId, WorkerInfo] = {}
        """Facts of the workers that are ready."""
        self._ends = WorkerEnds(owns_cluster=owns_cluster)
        self._watch = NodeWatch(node_table)
        self._avoided: tuple[str, ...] = ()
        self._places: dict[WorkerId, tuple[frozenset[str], int]] = {}
        """Worker -> (nodes on which it must not be placed, number of its withdrawn requests for a place)."""
        self._slice_s = math.inf if owns_cluster else _SLICE_S
        """Length of one wait in Ray, which a dead or drained node does not end; unlimited under a Ray started here."""
        self._postponed: dict[WorkerId, tuple[str, ...]] = {}
        """Workers that are started once the GCS answers -> nodes to avoid."""
        self._leases = Leases()
        self._unheard: list[ray.ObjectRef[Any]] = []
        self._store: RendezvousStore | None = None
        self._draining = DrainWatch(_draining_nodes, self._node_of, lambda: list(self._actors))
        self._gcs_limit_s = gcs_limit_s()

    def rendezvous(self) -> tuple[str, int]:
        host = ray.util.get_node_ip_address()
        if self._store is None:
            self._store = RendezvousStore(host)
        return host, self._store.port

    def secret(self, prefix: str) -> bytes:
        assert self._store is not None
        return self._store.secret(prefix)

    def where(self) -> tuple[str, str]:
        return adoption.where()

    def has_ended(self, cluster: str, job: str) -> bool:
        return adoption.has_ended(cluster, job)

    def of_another_version(self) -> WorkersOfAnotherVersion | None:
        return None if self._owns_cluster else other_versions.workers_of(self._run)

    def enter(self, terms: DriverSession, hold: LeadershipCheck) -> FoundWorkers:
        self._terms, self._leadership = terms, hold
        if self._owns_cluster:
            return FoundWorkers()
        found, ended = adoption.adopt(self._run, terms, self._identity, hold)
        for one, actor in found:
            self._actors[one.worker] = actor
            self._note(one.worker, one.facts)
        return FoundWorkers(adopted=tuple(one for one, _ in found), ended=ended)

    def start(self, worker: WorkerId, avoid: tuple[str, ...] = ()) -> None:
        assert self._terms is not None
        self._avoided = avoid
        if not self._gcs_answers():
            self._postponed[worker] = avoid
            return
        options, peers, place = dict(self._options), None, 0
        unfit = frozenset({*avoid, *self._watch.dead()})  # the cluster may not know of a dead node yet
        if worker in self._actors:
            before, place = self._places.get(worker, (unfit, 0))
            if before <= unfit or worker in self._facts or has_process(self._actors[worker]):
                return
            self.kill(worker)
            place += 1
        self._places[worker] = unfit, place
        there = {one: facts.node_id for one, facts in self._facts.items()}
        options["scheduling_strategy"] = self._placing.strategy(worker, there, unfit)
        if unfit:
            options["label_selector"] = not_on(unfit)
        if not self._owns_cluster:
            name = name_of(self._run, self._terms.epoch, worker, place)
            options |= {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}
            peers = RayPeers(self._run, name)
        actor = self._actor_class.options(**options).remote(worker, self._job, self._terms, self._identity, peers)
        self._actors[worker] = cast("ActorHandle[Any]", actor)
        self.call(worker, "ready")

    def call(self, worker: WorkerId, method: str, *args: Any) -> None:
        actor = self._actors.get(worker)
        if actor is not None and self._terms is not None:
            if method == "form" and not self._owns_cluster:
                self._calls |= self._leases.introduce(self._terms, worker, actor, self._facts)
            self._calls[actor.call.remote(self._terms.epoch, method, *args)] = (worker, method)

    def _renew(self) -> None:
        """Renew the leases of the workers."""
        if self._terms is not None and not self._owns_cluster:
            self._calls |= self._leases.renew(self._terms, self._actors, self._facts, self._calls.values())

    def kill(self, worker: WorkerId, *, at_once: bool = True) -> None:
        actor = self._actors.pop(worker, None)
        self._placing.forget(worker)
        self._places.pop(worker, None)
        self._calls = {ref: call for ref, call in self._calls.items() if call[0] != worker}
        facts = self._facts.pop(worker, None)
        self._leases.forget(worker)
        self._postponed.pop(worker, None)
        if actor is not None and self._terms is not None:
            self._ends.end(actor, facts, self._leadership, self._terms.epoch, at_once=at_once)

    def wait(self, timeout_s: float) -> list[Happened]:
        self._renew()
        if self._postponed and not self._draining.silent_s():
            for worker in list(self._postponed):
                self.start(worker, self._postponed.pop(worker))
                if worker in self._postponed:
                    break
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            happened: list[Happened] = [
                *self._draining.fetch(),
                *self._of_dead_nodes(),
                *self._verdicts(),
                *self._ends.explained(self._watch.dead()),
            ]
            happened = happened or [*self._wait(min(left_s, self._slice_s))]
            if happened or left_s == 0.0:
                return happened

    def _of_dead_nodes(self) -> list[WorkerLost]:
        dead = self._watch.dead()
        gone: list[WorkerLost] = []
        for worker, facts in list(self._facts.items()):
            if facts.node_id in dead:
                self._ends.forget_node(facts.node_id)
                self.kill(worker)
                reason = f"its node {facts.node} ({facts.node_id[:8]}) died: {dead[facts.node_id]}"
                gone.append(WorkerLost(worker=worker, reason=reason, node_id=facts.node_id, node_died=True))
        return gone

    def _verdicts(self) -> list[NodeLost | NodeBack]:
        """Nodes that are lost, or back, since the last call. Workers that wait for a place may get the latter."""
        found = self._watch.fetch()
        if any(isinstance(one, NodeBack) for one in found):
            for worker in self._places.keys() - self._facts.keys():
                self.start(worker, self._avoided)
        return found

    def _wait(self, timeout_s: float) -> list[Reply | WorkerLost]:
        refs = list(self._calls)
        if not refs:
            time.sleep(min(timeout_s, 0.05))
            return []
        done, rest = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if done and rest:
            more, _ = ray.wait(rest, num_returns=len(rest), timeout=0)
            done += more
        happened: list[Reply | WorkerLost] = []
        for ref in done:
            if ref in self._calls:
                worker, method = self._calls.pop(ref)
                happened.append(self._outcome(worker, method, ref))
        return happened

    def _outcome(self, worker: WorkerId, method: str, ref: ray.ObjectRef[Any]) -> Reply | WorkerLost:
        try:
            return self._replied(worker, method, ray.get(ref, timeout=60))
        except RayTaskError as error:
            node_id = self._node_of(worker)
            return Reply(worker=worker, method=method, error=_cause(error) or error, node_id=node_id)
        except RayError as error:  # also an object lost with its node
            node_id, facts = self._node_of(worker), self._facts.get(worker)
            self._watch.check()
            if facts is not None:
                self._ends.explain(worker, facts, by_ray=is_from_outside(error))
            self.kill(worker)
            return WorkerLost(worker=worker, reason=cause_of_death(error), error=_cause(error), node_id=node_id)

    def _node_of(self, worker: WorkerId) -> str:
        """Id of the node where a worker is, or is being started; empty if it has none so far. Any thread."""
        facts, actor = self._facts.get(worker), self._actors.get(worker)
        if facts is not None:
            return facts.node_id
        return node_of(actor) if actor is not None and self._gcs_answers() else ""

    def _gcs_answers(self) -> bool:
        """Whether the GCS answers now: calls to Ray that need it wait without a limit."""
        return not self._draining.silent_s() and gcs_answers(_GCS_AT_ONCE_S)

    def _replied(self, worker: WorkerId, method: str, value: Any) -> Reply:
        if isinstance(value, WorkerInfo):
            self._note(worker, value)
        return Reply(worker=worker, method=method, value=value)

    def _note(self, worker: WorkerId, facts: WorkerInfo) -> None:
        self._facts[worker] = facts
        self._leases.change()
        self._ends.watch(facts)
        self._watch.watch(facts.node_id, facts.node)

    def describe_shortage(self, wanted: int | None = None) -> str:
        if not self._gcs_answers():
            return "" if wanted else "The cluster's GCS does not answer: no worker can start until it is back."
        if not self._is_short(wanted):
            return ""
        resources, where = self._placing.resources(), self._placing.where
        least, lost = None if wanted else self._scaling.min_workers, self._watch.descriptions()
        return shortage_text(needs_of(self._scaling), least, *resources, self._avoided, lost=lost, where=where)

    def _is_short(self, wanted: int | None) -> bool:
        """False if so many workers are ready, have their resources, or can have them at once; None: enough to run."""
        if self._owns_cluster and not wanted:  # it has the resources of those: see `refuse_the_impossible`
            return False
        unfit = {*self._avoided, *self._watch.dead()}
        if any(room for node, room in self._placing.room().items() if node not in unfit):
            return False
        starting = [actor for worker, actor in self._actors.items() if worker not in self._facts]
        return len(self._facts) + sum(map(has_process, starting)) < (wanted or self._scaling.min_workers)

    def gcs_health(self) -> GcsHealth:
        return GcsHealth(silent_s=self._draining.silent_s(), limit_s=self._gcs_limit_s, leased=not self._owns_cluster)

    def abandon(self) -> None:
        if not self._owns_cluster:
            self._unheard += self._calls  # Ray would print their errors once nothing refers to them
            self._actors, self._calls, self._facts = {}, {}, {}

    def close(self) -> None:
        silent = self._draining.silent_s() > 0  # Ray ends this process soon: the error must be raised first
        within_s = _LAST_KILLS_WITHOUT_GCS_S if silent else _LAST_KILLS_S
        self._draining.close()
        for worker in list(self._actors):
            self.kill(worker, at_once=silent)
        self._watch.close()
        self._ends.close(within_s)
        if self._store is not None:
            self._store.close()
            self._store = None


def _draining_nodes() -> dict[str, float]:
    """Node id -> time at which it goes, in seconds since 1970; 0 without a deadline."""
    nodes = gcs().get_draining_nodes(timeout=_GCS_TIMEOUT_S)
    return {node: 0.0 if deadline_ms >= _NO_DEADLINE_MS else deadline_ms / 1000 for node, deadline_ms in nodes.items()}


def _cause(error: BaseException) -> BaseException | None:
    """The worker's own exception, if that is the cause."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else None

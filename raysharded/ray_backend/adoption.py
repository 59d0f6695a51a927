"""Adoption of workers on Ray from the driver before, and checks on that driver. Knows Ray."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raysharded.driver.startup.adopted_workers import may_go_on
from raysharded.errors import ClusterError
from raysharded.ownership.lease import ACTOR
from raysharded.protocol.session import AdoptedWorker, DriverSession, to_take_over
from raysharded.protocol.version import ASK
from raysharded.protocol.worker_launcher import LeadershipCheck
from raysharded.ray_backend.peers import GROUP, Named, find, handle

_log = logging.getLogger("raysharded.driver")
_ANSWER_S = 30.0
_RENEWALS = 3
"""Renewals within a lease's time, for workers that wait for the others."""
_LEAVE_S = 5.0
"""Time in which workers that are not taken over may exit; then they are killed."""


def where() -> tuple[str, str]:
    """(cluster, job) of this process; a task has no job.

    An actor counts as a separate job, `actor <id> start <n>`, for each start by Ray: it may outlive the job that made
    it.
    """
    context = ray.get_runtime_context()
    actor = context.get_actor_id()
    job = f"{ACTOR} {actor} start {num_restarts()}" if actor else ""
    job = context.get_job_id() if context.worker.mode == ray.SCRIPT_MODE else job
    return f"{context.gcs_address}/{context.get_session_name()}", job


def num_restarts() -> int:
    """Number of times that Ray has restarted this actor."""
    return int(ray._private.state.actors(ray.get_runtime_context().get_actor_id()).get("NumRestarts", 0))


def has_ended(cluster: str, job: str) -> bool:
    """Whether Ray knows that this job of this cluster is over; for an actor, that it is dead or was restarted."""
    try:
        if cluster != where()[0]:
            return False
        kind, _, rest = job.partition(" ")
        if kind == ACTOR:
            actor, _, start = rest.partition(" start ")
            known = ray._private.state.actors(actor)  # empty: Ray has forgotten it
            return bool(known) and (known["State"] == "DEAD" or int(known["NumRestarts"]) > int(start))
        return any(entry["JobID"] == job and entry["IsDead"] for entry in ray._private.state.jobs())
    except Exception:  # noqa: BLE001 - without Ray's answer the lease decides
        _log.info("Ray does not report whether job %s is over", job, exc_info=True)
        return False


def adopt(
    run: str, terms: DriverSession, identity: str, leadership: LeadershipCheck
) -> tuple[list[tuple[AdoptedWorker, Any]], int]:
    """The run's workers that obey this driver from now on, with their actors, and the number of ended workers.

    Workers of another job are ended, and workers that have not started or do not answer; none that obeys a newer
    driver.
    """
    actors = {named: actor for named in find(run) if (actor := handle(named)) is not None}
    started = alive()
    reached = {named: actor for named, actor in actors.items() if started is None or actor._actor_id.hex() in started}
    if any(not hasattr(actor, ASK) for actor in reached.values()):  # none was there before the run was acquired
        raise ClusterError(f"workers of raysharded 0.1 have joined run {terms.run_name!r} meanwhile. Start it again.")
    asked = {actor.adopt.options(concurrency_group=GROUP).remote(terms): named for named, actor in reached.items()}
    answers = _answers(asked, [actors[named] for named in asked.values()], terms)
    named_of = {(answer.epoch, answer.worker): named for named, answer in answers.items()}
    taken = {named_of[one.epoch, one.worker]: one for one in to_take_over(answers.values(), identity)}
    ended = _end({named: actor for named, actor in actors.items() if named not in taken}, terms, started, leadership)
    return [(answer, actors[named]) for named, answer in taken.items()], ended


def _answers(asked: Mapping[Any, Named], actors: Sequence[Any], terms: DriverSession) -> dict[Named, AdoptedWorker]:
    """Answers of the workers, without those that refused, are lost or take too long."""
    answers: dict[Named, AdoptedWorker] = {}
    renewals: list[Any] = []
    waiting, since = list(asked), time.monotonic()
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=terms.lease_s / _RENEWALS)
        answers |= {asked[ref]: answer for ref in done for answer in _answer(asked[ref], ref)}
        if may_go_on(list(answers.values()), time.monotonic() - since):
            break
        if waiting:  # otherwise those that are free believe that they have no driver
            renewals += [actor.renew.options(concurrency_group=GROUP).remote(terms.epoch) for actor in actors]
    return answers


def _end(
    actors: Mapping[Named, Any], terms: DriverSession, started: set[str] | None, leadership: LeadershipCheck
) -> int:
    """End these workers, and return how many were ended.

    Workers that obey a newer driver stay: this driver may have slept, and not know it yet.
    """
    asked = {
        actor.leave.options(concurrency_group=GROUP).remote(terms.epoch): named
        for named, actor in actors.items()
        if started is None or actor._actor_id.hex() in started
    }
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_LEAVE_S) if asked else ([], [])
    refused = {asked[ref] for ref in done if _refused(ref)}
    for named, actor in actors.items():
        if named not in refused and leadership.may_act():
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)
    return len(actors) - len(refused)


def _refused(ref: Any) -> bool:
    try:
        ray.get(ref, timeout=_LEAVE_S)
    except RayTaskError:  # it obeys a newer driver
        return True
    except RayError:
        pass  # it has exited
    return False


def _answer(named: Named, ref: Any) -> Iterator[AdoptedWorker]:
    try:
        yield ray.get(ref, timeout=_ANSWER_S)
    except Exception as error:  # noqa: BLE001 - with any error, it cannot be taken over
        _log.info("worker %s is not taken over: %s", named.name, error)


def alive() -> set[str] | None:
    """Ids of the actors that have started; None if Ray does not answer."""
    try:
        return set(ray._private.state.actors(actor_state_name="ALIVE"))
    except Exception:  # noqa: BLE001 - then all are queried
        return None

"""What a driver on Ray does about workers of the driver before it, and about that driver. Knows Ray."""

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
from raysharded.protocol.session import AdoptedWorker, DriverSession, to_take_over
from raysharded.protocol.version import ASK
from raysharded.protocol.worker_launcher import LeadershipCheck
from raysharded.ray_backend.peers import GROUP, Named, find, handle

_log = logging.getLogger("raysharded.driver")
_ANSWER_S = 30.0
_RENEWALS = 3
"""In a lease's time, to workers that wait for the others."""
_ACTOR = "actor"
_LEAVE_S = 5.0
"""How long those that are not taken over may take to end; then they are killed."""


def where() -> tuple[str, str]:
    """(cluster, job) of this process. An actor counts as a job of its own, `actor <id> start <n>`, each time that Ray
    starts it: it may go on when the job is over that made it. A task has none."""
    context = ray.get_runtime_context()
    actor = context.get_actor_id()
    job = f"{_ACTOR} {actor} start {num_restarts()}" if actor else ""
    job = context.get_job_id() if context.worker.mode == ray.SCRIPT_MODE else job
    return f"{context.gcs_address}/{context.get_session_name()}", job


def num_restarts() -> int:
    """How often Ray has started this actor again."""
    return int(ray._private.state.actors(ray.get_runtime_context().get_actor_id()).get("NumRestarts", 0))


def has_ended(cluster: str, job: str) -> bool:
    """Whether Ray knows that this job of this cluster is over; of an actor, that it is dead, or was started again."""
    try:
        if cluster != where()[0]:
            return False
        kind, _, rest = job.partition(" ")
        if kind == _ACTOR:
            actor, _, start = rest.partition(" start ")
            known = ray._private.state.actors(actor)  # nothing: Ray has forgotten it
            return bool(known) and (known["State"] == "DEAD" or int(known["NumRestarts"]) > int(start))
        return any(entry["JobID"] == job and entry["IsDead"] for entry in ray._private.state.jobs())
    except Exception:  # noqa: BLE001 - without Ray's word the lease decides
        _log.info("Ray does not tell whether job %s is over", job, exc_info=True)
        return False


def adopt(
    run: str, terms: DriverSession, identity: str, leadership: LeadershipCheck
) -> tuple[list[tuple[AdoptedWorker, Any]], int]:
    """The run's workers that obey this driver from now on, with their actors, and how many others were ended.

    Those of another job are ended, and those that have not started or do not answer; none that obeys a newer driver.
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
    """What they said, without those that refused, are gone or take too long."""
    answers: dict[Named, AdoptedWorker] = {}
    renewals: list[Any] = []
    waiting, since = list(asked), time.monotonic()
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=terms.lease_s / _RENEWALS)
        answers |= {asked[ref]: answer for ref in done for answer in _answer(asked[ref], ref)}
        if may_go_on(list(answers.values()), time.monotonic() - since):
            break
        if waiting:  # or else those that are free believe that they have no driver
            renewals += [actor.renew.options(concurrency_group=GROUP).remote(terms.epoch) for actor in actors]
    return answers


def _end(
    actors: Mapping[Named, Any], terms: DriverSession, started: set[str] | None, leadership: LeadershipCheck
) -> int:
    """End these workers, but for those that obey a newer driver: this one may have slept, and not know it yet. How
    many were ended."""
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
        pass  # it has ended
    return False


def _answer(named: Named, ref: Any) -> Iterator[AdoptedWorker]:
    try:
        yield ray.get(ref, timeout=_ANSWER_S)
    except Exception as error:  # noqa: BLE001 - whatever it is, it cannot be taken over
        _log.info("worker %s is not taken over: %s", named.name, error)


def alive() -> set[str] | None:
    """The ids of the actors that have started; None if Ray does not tell."""
    try:
        return set(ray._private.state.actors(actor_state_name="ALIVE"))
    except Exception:  # noqa: BLE001 - then all are asked
        return None

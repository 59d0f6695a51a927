"""Errors that the task, its data or storage raised in a worker: counted, recorded, and retried elsewhere.

A retry deals the microbatches of the failed step to other workers, by a shift as in an audit: the bits stay. So the one
that failed is computed by another worker, on another node if one has a member. If that one fails too, the cause is not
the node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from raysharded.driver.checkpoints import saves
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, Outcome, Record, prepend
from raysharded.driver.state.state import State
from raysharded.driver.workers import device_failures
from raysharded.errors import RayshardedError, TaskError, text_of
from raysharded.ids import WorkerId
from raysharded.layout import Mesh
from raysharded.protocol.messages import Source, Stopped, StopReason

_MICROBATCHES = re.compile(r"\bmicrobatch(es)? [\d, ]+")
_LONGEST = 8000
"""Characters of a traceback that the journal keeps, from its end."""


def errors(state: State) -> dict[WorkerId, Stopped]:
    """Stops of this generation for which the task, its data or storage is to blame."""
    raised = {worker: stop for worker, stop in state.stops.items() if stop.reason is StopReason.TASK_ERROR}
    return raised | device_failures.of_the_task(state)


def count(state: State, errors: Mapping[WorkerId, Stopped], at: float) -> Outcome:
    """Record and count one attempt at a step in which members raised; ends the run after too many.

    All of their errors count as one.
    """
    worker = min(errors, key=lambda one: errors[one].stopped_at)
    stopped = errors[worker]
    again = state.task_errors > 0
    first = state.first_task_error if again else stopped.error
    failing = max(stop.step for stop in errors.values()) + 1
    place = _place(state, worker)
    incident = state.incident
    if incident is not None:
        reason = f"worker {worker}: {text_of(stopped.error)}" if stopped.error is not None else f"worker {worker}"
        incident = replace(incident, reasons=(*incident.reasons, reason))
    state = replace(
        state,
        incident=incident,
        task_errors=state.task_errors + 1,
        failing_step=failing,
        first_task_error=first,
        failed_at=(*(state.failed_at if again else ()), place),
        failed_worker=worker,
    )
    retries = state.task_errors <= state.limits.task_error_retries
    commands: list[Command] = [_entry(state, worker, stopped, sorted(errors), retries=retries)]
    if retries:
        return state, commands
    num_nodes = len({_node_id(state, worker) for worker in state.members})
    error = _of_all_attempts(first, stopped.error, state.failed_at, num_nodes)
    return prepend(saves.end(state, error, at), commands)


def shift_of_retry(state: State, members: Sequence[WorkerId], mesh: Mesh, source: Source) -> tuple[int, int]:
    """The failed step, and by how many places its microbatches are shifted: `GenerationSpec.shift`; or (0, 0).

    There is a shift if the step failed in the generation before, with the same members: then another worker computes
    what failed, on another node if there is one. A further retry takes a further worker.
    """
    worker = state.failed_worker
    is_retry = state.task_errors > 0 and source.step < state.failing_step and state.limits.exact
    is_same = tuple(members) == state.members and (mesh.data, mesh.tensor) == (state.mesh.data, state.tensor)
    if not is_retry or not is_same or worker is None or worker not in members:
        return 0, 0
    data, node = mesh.data, _node_id(state, worker)
    failed = mesh.data_rank_of(members.index(worker))

    def is_near(shift: int) -> bool:
        groups, shards = divmod(shift, data.shards)
        replica = (data.replica_of(failed) - groups) % data.replicas
        acting = data.group(replica)[(data.shard_of(failed) - shards) % data.shards]
        return _node_id(state, members[acting * mesh.tensor]) == node

    shifts = sorted(range(1, data.world_size), key=lambda shift: (is_near(shift), shift))
    return (state.failing_step, shifts[(state.task_errors - 1) % len(shifts)]) if shifts else (0, 0)


def _entry(state: State, worker: WorkerId, stopped: Stopped, workers: Sequence[int], *, retries: bool) -> Record:
    error = stopped.error
    fields = {
        "worker": worker,
        "node": _host(state, worker),
        "step": state.failing_step,
        "phase": stopped.phase,
        "attempt": state.task_errors,
        "retried": retries,
        "error": f"{type(error).__name__}: {text_of(error)}" if error is not None else "",
        "traceback": getattr(error, "user_traceback", "")[-_LONGEST:],
        "workers": list(workers),
    }
    return Record(kind="task_error", fields=fields, durable=True)


def _host(state: State, worker: WorkerId) -> str:
    return state.facts[worker].node if worker in state.facts else ""


def _node_id(state: State, worker: WorkerId) -> str:
    return state.facts[worker].node_id if worker in state.facts else ""


def _place(state: State, worker: WorkerId) -> tuple[WorkerId, str]:
    return worker, _host(state, worker)


def _of_all_attempts(
    first: BaseException | None, last: BaseException | None, places: Sequence[tuple[WorkerId, str]], num_nodes: int
) -> BaseException | None:
    """The first error, with the workers and nodes of all attempts, and the last error if that differs."""
    if not isinstance(first, RayshardedError):
        return first
    same = _is_same(first, last)
    other = "" if same else f"\n(Attempt {len(places)} ended with another error, {type(last).__name__}: {last})"
    message = f"{first}{other}\n({_who(places, num_nodes, same=same)})"
    if isinstance(first, TaskError):
        return type(first)(message, first.user_traceback)
    return type(first)(message)


def _who(places: Sequence[tuple[WorkerId, str]], num_nodes: int, *, same: bool) -> str:
    named = [f"worker {worker}{f' on {host}' if host else ''}" for worker, host in places]
    if len(named) == 1:
        return f"Raised in {named[0]}."
    text = f"Raised in {named[0]}, then in {', '.join(named[1:])}."
    hosts = {host for _, host in places if host}
    if same and len(hosts) > 1:
        return f"{text} It comes on several nodes: look for it in the task or its data."
    if len({worker for worker, _ in places}) == 1 and num_nodes > 1:
        return f"{text} It is the same worker each time: its node may be the cause."
    return text


def _is_same(one: BaseException, other: BaseException | None) -> bool:
    """Whether both errors have the same cause: the microbatch or worker that met a bug first is chance."""
    if isinstance(one, TaskError) and isinstance(other, TaskError) and one.user_traceback:
        return one.user_traceback == other.user_traceback
    return (type(one), _MICROBATCHES.sub("", str(one))) == (type(other), _MICROBATCHES.sub("", str(other)))

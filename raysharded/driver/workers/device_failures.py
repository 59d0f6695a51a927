"""GPUs that fail in their workers' processes: remembered, and told from a task that fails on every GPU. Pure.

A bug of the task, such as an index out of range, ends one GPU's context after another, always in the same step. Several
GPUs may also fail in one step of one generation, for one cause in the machine. So the task is to blame if a step fails
on a GPU after it has failed on another, in an earlier generation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from raysharded.display.quantities import listing
from raysharded.driver.state.changed import replace
from raysharded.driver.state.persistent_map import with_entry
from raysharded.driver.state.state import State
from raysharded.errors import DeviceFailed, TaskError, text_of
from raysharded.ids import WorkerId
from raysharded.protocol.messages import Stopped, StopReason

MOST_FAILURES = 2
"""Failures of one GPU after which no worker on it is admitted: the first may be a bug of the task."""
_FORMING = "form"
"""Phase of a worker that forms a generation, where no step fails."""


def remember(state: State, worker: WorkerId, stopped: Stopped) -> State:
    """The state with one failure more of the worker's GPU."""
    device = _device(state, worker)
    failures = (*state.device_failures.get(device, ()), (_failing_step(stopped), stopped.generation))
    return replace(state, device_failures=with_entry(state.device_failures, device, failures))


def remember_death(state: State, worker: WorkerId, generation: int) -> State:
    """As `remember`, for a worker that died as its GPU reported a failure of itself: no step is to blame."""
    device = _device(state, worker)
    failures = (*state.device_failures.get(device, ()), (0, generation))
    return replace(state, device_failures=with_entry(state.device_failures, device, failures))


def number(state: State, device: str) -> int:
    """Failures of a GPU in this run."""
    return len(state.device_failures.get(device, ()))


def are_all_kept(state: State, workers: Collection[WorkerId]) -> bool:
    """Whether the processes of these workers keep all GPUs that the run has had and that may get a worker."""
    usable = {device for worker in state.facts if number(state, device := _device(state, worker)) < MOST_FAILURES}
    return usable <= {_device(state, worker) for worker in workers}


def of_the_task(state: State) -> dict[WorkerId, Stopped]:
    """Stops of this generation by a GPU's failure for which the task is to blame, each with a TaskError."""
    return {
        worker: replace(stopped, error=_task_error(stopped, [*earlier, _device(state, worker)]))
        for worker, stopped in state.stops.items()
        if stopped.reason is StopReason.DEVICE and (earlier := _others(state, worker, stopped))
    }


def _others(state: State, worker: WorkerId, stopped: Stopped) -> list[str]:
    """Other GPUs that failed in the same step of an earlier generation."""
    own, step = _device(state, worker), _failing_step(stopped)
    failures: Mapping[str, tuple[tuple[int, int], ...]] = state.device_failures
    return [
        device
        for device, found in failures.items()
        if device != own and step and any(at == step and generation < stopped.generation for at, generation in found)
    ]


def _task_error(stopped: Stopped, devices: list[str]) -> TaskError:
    error = stopped.error
    traceback = error.user_traceback if isinstance(error, DeviceFailed) else ""
    what = "the GPU does not work" if error is None else text_of(error)
    return TaskError(
        f"step {_failing_step(stopped)} fails on one GPU after another ({listing(devices)}): look for the cause in the "
        f"task, as for an index out of range. The last: {what}",
        traceback,
    )


def _failing_step(stopped: Stopped) -> int:
    """The step that failed; 0 outside of steps."""
    return 0 if stopped.phase == _FORMING else stopped.step + 1


def _device(state: State, worker: WorkerId) -> str:
    known = state.facts[worker].device if worker in state.facts else ""
    return known or f"the GPU of worker {worker}"

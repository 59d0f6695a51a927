"""Refusal of torch's process groups in a user's loop: its workers change, and sums over them depend on their number.

In a step torch has a default group, through which the workers of the generation communicate. All of torch's functions
for groups call one of a few internal functions, which they look up at each call. So these are exchanged: names that a
module has imported early, and groups taken from a mesh, are found too. The caller decides: calls of torch and of
raysharded pass, and those of other threads.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d

from raysharded.actors.task_calls.task_errors import frames_here, is_installed, line_here
from raysharded.errors import TaskError

_PLACES: tuple[tuple[Any, str], ...] = (
    (dist, "init_process_group"),
    (dist, "destroy_process_group"),
    (distributed_c10d, "_get_default_group"),
    (distributed_c10d, "_rank_not_in_group"),
    (_functional_collectives, "_resolve_group"),
)
"""Some torch may lack one: what it has is exchanged."""
_OF_GROUPS = tuple(
    f"torch.distributed.{name}" for name in ("distributed_c10d", "_functional_collectives", "nn.functional")
)
_AROUND = ("torch.autograd.function", "torch.distributed.c10d_logger", "typing_extensions")
"""Modules whose wrappers are around functions for groups."""
_OF_LOG = "_get_msg_dict"
"""The function with which torch describes an error of a collective: it reads ranks."""
_PASS = ("raysharded", "torch", "accelerate", "transformers", "torchtitan")
"""Packages that may use groups: the adapters see to what the last three do."""
_READ = ("get_rank", "get_world_size")
"""Functions that packages call for their logs."""
_WAYS = {
    "get_rank": "Read session.rank, which may change between two steps.",
    "get_world_size": (
        "Leave it out: the number of workers changes, and what is counted by it has other bits at other sizes. A step "
        "has session.batch.num_microbatches microbatches at every size, and a run session.max_steps steps."
    ),
    "init_process_group": "Leave it out: session.shard connects the workers.",
    "destroy_process_group": "Leave it out: a worker closes its groups itself.",
}
_WAY = (
    "Workers change, and what they sum up depends on their number. step.loss and step.metrics are sums over all "
    "microbatches, exact at every size: give numbers to step.backward(..., metrics=). session.log takes numbers that "
    "are the same on every worker, and session.shard(..., name=object) state that all have."
)
_thread = threading.local()


def refuse_groups() -> None:
    """From now on let a use of torch's process groups by the calling thread raise TaskError with its line."""
    _thread.is_watched = True
    for module, name in _PLACES:
        function = getattr(module, name, None)
        if function is not None and not hasattr(function, "refuses_loops"):
            setattr(module, name, _refusing(function))


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def refusing(*args: Any, **others: Any) -> Any:
        if getattr(_thread, "is_watched", False):
            _require_own_caller(function.__name__)
        return function(*args, **others)

    vars(refusing)["refuses_loops"] = True
    return refusing


def _require_own_caller(name: str) -> None:
    """Raise TaskError if the function for groups that is running was called by a user's loop. `name`: the place's."""
    for frame in frames_here():
        module, function = str(frame.f_globals.get("__name__", "")), frame.f_code.co_qualname.partition(".")[0]
        if module == __name__ or (module in _AROUND and function != _OF_LOG):
            continue
        if module in _OF_GROUPS:
            name = name if function.startswith("_") else function
            continue
        reads = name == "get_backend" or (name in _READ and is_installed(frame.f_code.co_filename))
        if module.partition(".")[0] not in _PASS and not reads:
            found = f"{line_here()}: torch.distributed.{name}() was called in the training function."
            raise TaskError(f"{found} {_WAYS.get(name, _WAY)}")
        return

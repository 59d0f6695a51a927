"""The exchange of the states of a session's streams among the workers, at the end of each step."""

from __future__ import annotations

import torch

from raysharded.actors.comm.host_group import HostGroup
from raysharded.actors.optimizer.registered_state import RegisteredState
from raysharded.actors.task_calls.remarks import Say

_WORD_BYTES = 8


def exchange_states(registered: RegisteredState, step: int, group: HostGroup, say: Say) -> None:
    """Bring the states of all streams to all workers. All call it together, as they end the same step.

    The step becomes the run's last one if a stream has no microbatch for the next one.
    """
    streams = registered.streams
    if streams is None:
        return
    ended = streams.add(step, _gathered(streams.own_part(step), group))
    if ended:
        registered.is_last = True
        say("ended streams", ended)


def _gathered(own: bytes, group: HostGroup) -> list[bytes]:
    """The bytes of all workers, by rank."""
    if group.size == 1:
        return [own]
    sizes = torch.zeros(group.size, dtype=torch.int64)
    sizes[group.rank] = len(own)
    lengths = group.sum_int64(sizes).tolist()
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + -(-length // _WORD_BYTES) * _WORD_BYTES)
    room = torch.zeros(starts[-1], dtype=torch.uint8)
    room[starts[group.rank] : starts[group.rank] + len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    data = group.sum_int64(room.view(torch.int64)).view(torch.uint8).numpy().tobytes()
    return [data[start : start + length] for start, length in zip(starts, lengths, strict=False)]

"""Transfer of bytes that one rank has read to the others that need them, over their process group.

Every rank knows its transfers before the first begins, in one common order, so nothing is requested that might not
arrive. The round bounds the bytes that have to be copied to be sent (scattered memory, another device).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from raysharded.checkpoint.state_dict.staging import is_plain, synchronize


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that one rank of the group has and others need, as seen by one rank."""

    round: int
    source: int
    targets: tuple[int, ...]
    tensor: torch.Tensor
    """Memory on this rank: read on the source, filled on a target."""


def exchange(transfers: Sequence[Transfer], group: dist.ProcessGroup | None, rank: int, world_size: int) -> None:
    """Carry out this rank's transfers, in the order common to all ranks. All ranks must call it."""
    if world_size > 1 and _kinds(group) != ["cpu"]:
        dist.barrier(group)  # NCCL requires all ranks in a group's first operation
    for _, some in groupby(transfers, key=lambda transfer: transfer.round):
        _round(list(some), group, rank, world_size)


def _round(transfers: list[Transfer], group: dist.ProcessGroup | None, rank: int, world_size: int) -> None:
    wires = [_Wire.of(transfer.tensor, group, receives=transfer.source != rank) for transfer in transfers]
    pairs: list[Any] = []
    for transfer, wire in zip(transfers, wires, strict=True):
        if len(transfer.targets) + 1 < world_size:
            peers = transfer.targets if transfer.source == rank else (transfer.source,)
            act: Callable[..., Any] = dist.isend if transfer.source == rank else dist.irecv
            pairs += [dist.P2POp(act, wire.bytes, _global(group, peer), group) for peer in peers]
    works = dist.batch_isend_irecv(pairs) if pairs else []
    for transfer, wire in zip(transfers, wires, strict=True):
        if len(transfer.targets) + 1 == world_size:
            dist.broadcast(wire.bytes, _global(group, transfer.source), group)
    for work in works:
        work.wait()
    for transfer, wire in zip(transfers, wires, strict=True):
        if transfer.source != rank:
            wire.deliver()
    synchronize(transfer.tensor.device for transfer in transfers)


def _global(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


@dataclass(frozen=True, slots=True)
class _Wire:
    """A tensor as the group can send or receive it: flat bytes on a device that the group serves."""

    tensor: torch.Tensor
    carrier: torch.Tensor

    @staticmethod
    def of(tensor: torch.Tensor, group: dist.ProcessGroup | None, *, receives: bool) -> _Wire:
        tensor = tensor.detach()
        device = _device_for(tensor.device, group)
        if is_plain(tensor) and tensor.device == device:
            return _Wire(tensor, tensor)
        carrier = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if not receives:
            carrier.copy_(tensor)
        return _Wire(tensor, carrier)

    @property
    def bytes(self) -> torch.Tensor:
        return self.carrier.reshape(-1).view(torch.uint8)

    def deliver(self) -> None:
        if self.carrier is not self.tensor:
            self.tensor.copy_(self.carrier)


def _device_for(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """The tensor's own device if the group serves it, else this process's current device of a kind that it serves."""
    kinds = _kinds(group)
    if device.type in kinds:
        return device
    kind = next((kind for kind in kinds if kind != "cpu"), "cpu")
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device("cpu")


def _kinds(group: dist.ProcessGroup | None) -> list[str]:
    """Device types that a group serves."""
    known: Any = dist.group.WORLD if group is None else group
    return [device.type for device in known._device_types]  # it has no public name

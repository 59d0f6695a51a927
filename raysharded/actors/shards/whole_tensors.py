"""Whole tensors that are spread over the workers, for programs that need all of them in one process."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import load, save

from raysharded.actors.comm.host_group import HostGroup
from raysharded.actors.model.sharded_model import ShardedModel, local_of
from raysharded.actors.shards.position import RankPosition

_NOTHING = torch.empty(0, dtype=torch.uint8)


def gather_tensors(own: Mapping[str, torch.Tensor], group: HostGroup) -> dict[str, torch.Tensor]:
    """The tensors of all members by name; no two members have the same name. Host memory, contiguous, any dtype.

    Every member must call it. Each holds all of them twice meanwhile.
    """
    packed = torch.frombuffer(bytearray(save(dict(own))), dtype=torch.uint8)
    sizes = _sizes(packed.numel(), group)
    received = torch.empty(sum(sizes), dtype=torch.uint8)
    group.exchange(received, packed.repeat(len(sizes)), sizes, [packed.numel()] * len(sizes))
    found: dict[str, torch.Tensor] = {}
    for part in received.split(sizes):
        found |= load(part.numpy().tobytes())
    return found


def whole_weights(
    sharded: ShardedModel, place: RankPosition, group: HostGroup, *, everywhere: bool = False
) -> dict[str, torch.Tensor] | None:
    """Parameters, tied ones once, and persistent buffers by name, in host memory of rank 0; None on other ranks.

    Every member must call it. One parameter after the other: rank 0 needs the model and one parameter. Rows of a
    parameter lie on the workers of the first shard group in the order of their ranks. `everywhere`: on all ranks.
    """
    found: dict[str, torch.Tensor] = {}
    for name, param in sharded.parameters.items():
        local = local_of(param).cpu().contiguous()
        has_part = place.replica == 0 and (name not in sharded.cuts.replicated or place.rank == 0)
        part = local.reshape(-1).view(torch.uint8) if has_part and local.numel() else _NOTHING
        whole = _joined(part, group, everywhere)
        if whole is not None:
            found[name] = whole.view(param.dtype).reshape(param.shape)
    if place.rank != 0 and not everywhere:
        return None
    return found | {name: buffer.detach().cpu().clone() for name, buffer in sharded.persistent_buffers.items()}


def _joined(own: torch.Tensor, group: HostGroup, everywhere: bool) -> torch.Tensor | None:
    """The bytes of all members, one after the other by rank; None at other ranks than 0, unless `everywhere`."""
    sizes = _sizes(own.numel(), group)
    num_takers, takes = len(sizes) if everywhere else 1, everywhere or group.rank == 0
    received = torch.empty(sum(sizes) if takes else 0, dtype=torch.uint8)
    given = [own.numel() if rank < num_takers else 0 for rank in range(len(sizes))]
    group.exchange(received, own.repeat(num_takers), sizes if takes else [0] * len(sizes), given)
    return received if takes else None


def _sizes(own: int, group: HostGroup) -> list[int]:
    """The members' numbers of bytes, by rank."""
    sizes = torch.zeros(group.size, dtype=torch.int64)
    sizes[group.rank] = own
    found: list[int] = group.sum_int64(sizes).tolist()
    return found

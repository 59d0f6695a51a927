"""The check that an all-gather reads the memory that the optimizer writes to.

FSDP2 has every shard twice: as the module's parameter, and flat and padded for an all-gather. Both share memory. torch
2.9 made new memory for padded shards in a model's first forward. The optimizer then keeps the old memory: no forward
sees its updates, and no error is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

from raysharded.actors.model.sharded_model import ShardedModel, local_of
from raysharded.errors import InexactError
from raysharded.versions import SELF_TEST, tested

_log = logging.getLogger("raysharded.worker")


def check_memory(sharded: ShardedModel, written: Mapping[str, torch.Tensor]) -> None:
    """Raise `InexactError` if a parameter's shard is gathered from other memory than it is kept in or written to.

    Call after a generation's first forward. `written`: the tensors that the optimizer updates, by parameter name.
    """
    read = _gathered(sharded)
    if read is None:
        _log.warning(
            "cannot check whether torch %s gathers the memory that the optimizer writes: run `%s`",
            torch.__version__,
            SELF_TEST,
        )
        return
    wrong = [
        name
        for name, param in sharded.parameters.items()
        if not all(_is_read(kept, read.get(param)) for kept in (local_of(param), local_of(written.get(name, param))))
    ]
    if wrong:
        raise InexactError(
            f"torch {torch.__version__} gathers other memory than the optimizer writes to, of {len(wrong)} of "
            f"{len(sharded.parameters)} parameters, first {wrong[0]!r}: the weights would be silently wrong. "
            f"raysharded was tested with {tested('torch')}: install one of these, or another one that passes "
            f"`{SELF_TEST}`."
        )


def _is_read(kept: torch.Tensor, read: torch.Tensor | None) -> bool:
    """True if a shard begins where the gathered memory begins. A worker without rows of the parameter keeps none."""
    return kept.numel() == 0 or (read is not None and kept.data_ptr() == read.data_ptr())


def _gathered(sharded: ShardedModel) -> dict[nn.Parameter, torch.Tensor] | None:
    """Parameter -> the memory that an all-gather reads, or a forward for a scalar.

    None if this torch's FSDP2 keeps it under another name.
    """
    found: dict[nn.Parameter, torch.Tensor] = {p: p for p in sharded.parameters.values() if not p.dim()}
    try:
        for _, unit in sharded.units:
            group = unit._get_fsdp_state()._fsdp_param_group
            for param in group.fsdp_params if group is not None else ():
                found[param.sharded_param] = param._sharded_param_data
    except AttributeError:
        return None
    return found

"""The gradients of scalar parameters, which FSDP2 leaves alone: added as those of a unit that every worker has whole.

A microbatch's backward leaves them with the parameters. They go along the same tree as all others, and the last round
of a step leaves their sum there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from raysharded.actors.reduction import Rounds, TreeReducer


class ScalarGradients:
    """Of one generation's model on one worker. Training thread only."""

    def __init__(self, parameters: Iterable[nn.Parameter], rounds: Rounds, *, exact: bool) -> None:
        """`parameters`: all of the model's, whose order is the same on every worker."""
        self.params = [param for param in parameters if not param.dim() and param.requires_grad]
        self._rounds = rounds
        self.reducers = [TreeReducer(rounds, "the scalar parameters", replicated=True)] if self.params and exact else []

    def reduce(self) -> None:
        """Add those of a microbatch whose backward is done; every worker must call it in every round."""
        for reducer in self.reducers:
            flat = self._flat()
            reducer.in_a_group_of_one(flat)
            if self._rounds.is_last:
                for place, param in enumerate(self.params):
                    param.grad = flat[place].to(param.dtype)

    def fill(self) -> None:
        """Give each a gradient, of 0 where this worker's microbatches did not use it."""
        for param in self.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)

    def _flat(self) -> torch.Tensor:
        """In memory of its own, in the widest of their dtypes."""
        dtype = self.params[0].dtype
        for param in self.params[1:]:
            dtype = torch.promote_types(dtype, param.dtype)
        flat = torch.zeros(len(self.params), dtype=dtype, device=self.params[0].device)
        for place, param in enumerate(self.params):
            if param.grad is not None:
                flat[place] = param.grad
        return flat

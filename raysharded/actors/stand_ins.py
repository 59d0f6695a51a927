"""Other parameters in the place of an optimizer's own, for as long as somebody tries what it does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from raysharded.actors.contents import SavedContents
from raysharded.actors.optimizer_parts import OptimizerParts


class StandIns:
    """The task's own optimizer object, with its hooks and patched methods, over other parameters.

    What it holds, and its hooks hold, is put back before each trial and at the end.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, without: Collection[torch.Tensor]) -> None:
        """`without`: tensors whose values may be lost, such as the parameters of a model that is not loaded yet."""
        self.parts = OptimizerParts(optimizer)
        own = [param for held in self.parts.lists for param in held]
        self._saved = SavedContents(optimizer, without=[*without, *own])
        self.own = [list(held) for held in self.parts.lists]
        """The optimizer's own parameters, by list as of `OptimizerParts.lists`."""

    def give(self, of: Mapping[int, Sequence[nn.Parameter]]) -> None:
        """Put everything back, and in the place of each parameter those that `of` has for its id."""
        self.put_back()
        for held, own in zip(self.parts.lists, self.own, strict=True):
            held[:] = [one for param in own for one in of.get(id(param), ())]

    def make_anew(self) -> None:
        """Put everything back but the parameters and what is kept of them: so a worker begins that joins."""
        lists = [list(held) for held in self.parts.lists]
        kept = {id(one): (one, self.parts.kept_of(one)) for held in lists for one in held}
        self.put_back()
        for held, given in zip(self.parts.lists, lists, strict=True):
            held[:] = given
        for one, values in kept.values():
            for name, value in values.items():
                self.parts.keep(one, name, value)

    def put_back(self) -> None:
        """The optimizer as it was, with its own parameters."""
        self._saved.put_back()


@contextmanager
def stand_ins(optimizer: torch.optim.Optimizer, *, without: Collection[torch.Tensor] = ()) -> Iterator[StandIns]:
    """Within it other parameters can be given to an optimizer; afterwards it is as it was."""
    found = StandIns(optimizer, without=without)
    try:
        yield found
    finally:
        found.put_back()

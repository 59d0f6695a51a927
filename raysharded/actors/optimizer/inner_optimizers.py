"""A torch optimizer together with the optimizers that it holds: their groups, and what they keep of a parameter.

One that steps several others (AdamW for some parameters, SGD for the rest) has them as attributes, in lists, or in what
its functions have closed over; so may its hooks. Their state is state of the run as its own is. `stand_ins` puts other
parameters in the place of their own, for as long as somebody tries what they do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raysharded.actors.task_calls.object_contents import SavedContents, reachable


class OptimizerParts:
    """An optimizer and all that it holds, the outermost first."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.outermost = optimizer
        found = [
            (path.lstrip(".").replace(".", "/"), one)
            for path, one in reachable(optimizer)
            if isinstance(one, torch.optim.Optimizer)
        ]
        self.all: tuple[torch.optim.Optimizer, ...] = tuple(one for _, one in found)
        groups = {id(group): group for one in self.all for group in one.param_groups}
        self.groups: tuple[dict[str, Any], ...] = tuple(groups.values())
        """Of all of them, each once: some share theirs, some have copies."""
        states = {id(one.state): (path, one.state) for path, one in reversed(found)}
        self._states = dict(reversed(states.values()))
        """Path to whose it is -> its state; what several share, once."""

    @property
    def lists(self) -> list[list[Any]]:
        """The groups' lists of parameters, each once."""
        return list({id(group["params"]): group["params"] for group in self.groups}.values())

    def kept_of(self, param: torch.Tensor) -> dict[str, Any]:
        """Name -> what they keep of a parameter. The outermost's names are its own; others begin with the path."""
        return {
            f"{path}:{key}" if path else key: value
            for path, state in self._states.items()
            for key, value in state.get(param, {}).items()
        }

    def keep(self, param: torch.Tensor, name: str, value: Any) -> None:
        """Let whose it is keep something of a parameter, by the name that `kept_of` gives it. Raises KeyError if there
        is no such optimizer."""
        path, _, key = name.rpartition(":")
        self._states[path].setdefault(param, {})[key] = value

    def drop(self, param: torch.Tensor, name: str) -> None:
        """Let whose it is keep this no more, by the name that `kept_of` gives it."""
        path, _, key = name.rpartition(":")
        del self._states[path][param][key]
        if not self._states[path][param]:
            del self._states[path][param]

    def forget(self) -> None:
        """Let none of them keep anything."""
        for state in self._states.values():
            state.clear()

    def counts(self, param: torch.Tensor) -> Iterator[tuple[dict[str, Any], str]]:
        """Where the number of steps that a parameter has had is kept: (dict, key)."""
        for state in self._states.values():
            kept = state.get(param, {})
            if "step" in kept and (isinstance(kept["step"], (int, float)) or kept["step"].numel() == 1):
                yield kept, "step"


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

"""Outputs of units and of the model: outputs without tensors for FSDP2, views, and the edges of a graph.

FSDP2 learns from a unit's outputs when backward needs the unit's weights. The first step's outputs are inspected, so
that an error in its backward can name the unit. A microbatch in which nothing counts has a loss without a graph. It
takes part in the others' backward through the edges of the model's outputs.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.rnn import PackedSequence

from raysharded.actors.in_place.unit_hooks import UnitHooks
from raysharded.actors.task_calls.object_contents import reachable
from raysharded.errors import TaskError

_AS_A_COPY = "write x = x + y for x += y, or return a clone()"


class OutputWatch:
    """Watch of the outputs of one generation's model, in training. Training thread only."""

    def __init__(self, hooks: Sequence[tuple[str, UnitHooks]], *, looks: bool) -> None:
        """`hooks`: the units', with their names; the root's is empty.

        `looks`: whether to inspect outputs of units other than the root; False if they are compiled, hooks included.
        """
        self._objects: dict[str, str] = {}
        """Unit -> the class of its output, for outputs in which FSDP2 finds no tensors."""
        self._views: dict[str, None] = {}
        self._edges: list[tuple[GradientEdge, torch.Size, torch.dtype, torch.device]] = []
        """Graph edges of a microbatch, each with the shape, dtype and device of its gradient."""
        self._placed = []
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)  # on views: see below
        for name, each in hooks:
            if looks or not name:
                self._placed.append(each.at_end(partial(self._look, name)))
            if not name:
                each.at_end(self._keep_edges)  # after FSDP2's hooks, which are on the same edges

    def end_first_step(self) -> None:
        """Stop inspecting outputs."""
        for placed in self._placed:
            placed.remove()
        self._placed.clear()

    def forget(self) -> None:
        """Release the graph of a microbatch before the next one, or because its loss has a graph."""
        self._edges.clear()

    def backward_of_nothing(self) -> None:
        """Run a backward through the model with zero gradients."""
        edges = [edge for edge, *_ in self._edges]
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for _, shape, dtype, device in self._edges]
        self._edges.clear()
        torch.autograd.backward(edges, zeros)

    @property
    def has_edges(self) -> bool:
        """True if a forward of the microbatch made a graph."""
        return bool(self._edges)

    def suspects(self) -> str:
        """A sentence on the unit other than the root whose weights may not be gathered for backward; may be empty."""
        for name, kind in self._objects.items():
            if name:
                return f"Unit {name} {_returns(kind)}, or let Task.wrap leave such units to their parent."
        for name in self._views:
            if name:
                return (
                    f"The output of unit {name} is a view, and is changed in place by what comes after: {_AS_A_COPY}. "
                    "If it is not, create_graph=True is what does not work: sharded weights have no gradient of a "
                    "gradient."
                )
        return ""

    def refuse_lost(self, where: str) -> None:
        """Raise TaskError for a backward that reached no unit: FSDP2 then silently makes no gradients."""
        if "" in self._objects:
            found = f"The model {_returns(self._objects[''])}."
        elif "" in self._views:
            found = f"The output of the model is a view, and is changed in place by the loss: {_AS_A_COPY}."
        else:
            found = (
                "The loss does not depend on what the model returned (a detach(), a no_grad()). Let it, or freeze what "
                "is not to be trained (requires_grad=False)."
            )
        raise TaskError(f"the backward of {where} came to none of the model's units: nothing would be trained. {found}")

    def _look(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        found = list(_tensors_in(output))
        if any(tensor.requires_grad and tensor._base is not None for tensor in found):
            self._views[name] = None
        if not found and not isinstance(output, (torch.Tensor, type(None))):
            inside = (one for _, one in reachable(output) if isinstance(one, torch.Tensor))
            if any(tensor.requires_grad for tensor in inside):
                self._objects[name] = type(output).__name__

    def _keep_edges(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                self._edges.append((get_gradient_edge(tensor), tensor.shape, tensor.dtype, tensor.device))


def _returns(kind: str) -> str:
    return f"returns a {kind}, in which FSDP2 finds no tensors: return a tensor, a tuple, a dict or a dataclass"


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that FSDP2 finds in an output."""
    match value:
        case torch.Tensor():
            yield value
        case PackedSequence():
            yield value.data
        case Mapping():
            for item in value.values():
                yield from _tensors_in(item)
        case list() | tuple() | set():
            for item in value:
                yield from _tensors_in(item)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for each in dataclasses.fields(value):
                yield from _tensors_in(getattr(value, each.name))

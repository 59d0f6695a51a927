"""A model and the units of it that FSDP2 has wrapped, and queries on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from raysharded.actors.in_place.fsdp_tree import FsdpTree
from raysharded.actors.in_place.unit_hooks import UnitHooks
from raysharded.actors.model.inventory import Inventory
from raysharded.actors.model.param_layout import ParamLayout
from raysharded.actors.model.parameter_marks import ParameterMarks

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(name: str) -> str:
    """A parameter's name as in the unwrapped model."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedModel:
    """A model that computes with the parameters of one generation; their memory is allocated but not filled."""

    model: nn.Module
    tree: FsdpTree
    """The nodes that FSDP2 has wrapped in place of the model's modules."""
    units: tuple[tuple[str, FSDPModule], ...]
    """The FSDP2 units, nodes of the tree, with their names; the root last."""
    hooks: tuple[tuple[str, UnitHooks], ...]
    """The hooks of the units' modules, in the same order."""
    parameters: dict[str, nn.Parameter]
    """Clean name -> sharded parameter (a DTensor, except a scalar); tied parameters once."""
    persistent_buffers: dict[str, torch.Tensor]
    """Clean name -> buffer; part of the state, equal on every worker."""
    cuts: ParamLayout
    """Layout of the parameters over the workers."""
    marks: ParameterMarks = field(default_factory=ParameterMarks)
    """The task's attributes and hooks on its parameters."""
    inventory: Inventory = field(default_factory=Inventory)
    """Other results of the build."""
    replicated_units: frozenset[str] = frozenset()
    """The names of the units that every worker has whole."""

    def drop_gathered(self) -> None:
        """Free the gathered parameters that a forward without a backward has left: the next forward gathers anew.

        FSDP2 keeps those of the root, and of units that are not freed after a forward. They would outlive a change of
        the parameters.
        """
        for _, unit in self.units:
            unit.reshard()

    def release(self) -> None:
        """Leave the model without memory and without hooks of this generation. Idempotent."""
        self.tree.detach(hooks for _, hooks in self.hooks)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, buffer) of the buffers that are state; a buffer that modules share comes once for each name."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def holds_parameters(unit: FSDPModule, *, trainable: bool = False) -> bool:
    """Whether the unit has a (trainable) parameter that FSDP2 shards, and that no unit inside it holds."""
    assert isinstance(unit, nn.Module)
    inner = [module for module in list(unit.modules())[1:] if isinstance(module, FSDPModule)]
    held_inside = {id(param) for module in inner for param in module.parameters()}
    own = (param for param in unit.parameters() if id(param) not in held_inside and param.dim())
    return any(param.requires_grad or not trainable for param in own)


def reduces_gradients(unit: FSDPModule) -> bool:
    """Whether FSDP2 reduces gradients for this unit; False without trainable parameters of the unit itself."""
    return holds_parameters(unit, trainable=True)


def local_of(param: torch.Tensor) -> torch.Tensor:
    """This worker's part of a sharded parameter or gradient, sharing its memory."""
    # as `to_local` returns it without gradients, at a tenth of the time
    return (param._local_tensor if isinstance(param, DTensor) else param).detach()

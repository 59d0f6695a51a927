"""The modules that FSDP2 wraps in one generation, in place of the model's own.

FSDP2 changes a module that it wraps for ever: its class, its hooks, its parameters. So it wraps nodes: one bare module
for each of the model's, in a tree of the same names. A node shares its module's dictionaries of parameters and buffers.
FSDP2 puts shards and gathered weights there, and a forward of the model finds them. A generation ends by giving
each module a dictionary of parameters without memory; nothing of FSDP2's is undone, also after an aborted forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.fsdp import FSDPModule

from raysharded.actors.in_place.unit_hooks import UnitHooks


@dataclass(frozen=True, slots=True)
class Parts:
    """The parameters and modules that a module of the model directly has, by name."""

    parameters: Mapping[str, nn.Parameter | None]
    """Without memory."""
    modules: Mapping[str, nn.Module | None]


Origin: TypeAlias = Mapping[nn.Module, Parts]
"""Parts of each of a model's modules, as it was built."""
_FOR_DYNAMO = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Attributes that FSDP2 sets on every module it manages, for `torch.compile`."""


def origin_of(model: nn.Module) -> Origin:
    """Parts of each of the model's modules, as they are now."""
    return {module: Parts(dict(module._parameters), dict(module._modules)) for module in model.modules()}


class _Node(nn.Module):
    """One module of the tree; FSDP2 puts its parameters into the dictionary, without `__setattr__`."""


class _TellingNode(nn.Module):
    """The node of a module with a custom `__setattr__`, which is given every parameter through it."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        module = vars(self).get("_module")
        if module is not None and name in self._parameters:
            setattr(module, name, value)


@cache
def _node_class(name: str, base: type[nn.Module]) -> type[nn.Module]:
    """A class with the name of the model's, for torch's messages."""
    return type(name, (base,), {})


def _needs_telling(module: nn.Module) -> bool:
    return type(module).__setattr__ is not nn.Module.__setattr__


class FsdpTree:
    """The tree of one generation. It needs no code of the user's, and no memory until it is allocated."""

    def __init__(self, model: nn.Module, origin: Origin) -> None:
        self._origin = origin
        self._nodes = {module: _node_of(module, parts) for module, parts in origin.items()}
        for module, parts in origin.items():
            for name, child in parts.modules.items():
                self._nodes[module]._modules[name] = None if child is None else self._nodes[child]
        self.root = self._nodes[model]

    def node_of(self, module: nn.Module) -> nn.Module:
        """The node of one of the model's modules."""
        return self._nodes[module]

    def unit_of(self, module: nn.Module) -> FSDPModule:
        """The node of a module that is a unit, once FSDP2 has wrapped it."""
        node = self._nodes[module]
        assert isinstance(node, FSDPModule)
        return node

    def attach(self, hooks: Iterable[UnitHooks]) -> None:
        """Let the model compute with the tree's parameters. `hooks`: those of all units, which FSDP2 has wrapped."""
        for module, node in self._nodes.items():
            vars(module)["_parameters"] = node._parameters
            vars(module).update({name: vars(node)[name] for name in _FOR_DYNAMO if name in vars(node)})
            if isinstance(node, _TellingNode):
                for name, param in node._parameters.items():
                    setattr(module, name, param)
                vars(node)["_module"] = module
        for unit in hooks:
            unit.gather_with(self._nodes[unit.module])

    def detach(self, hooks: Iterable[UnitHooks]) -> None:
        """Give the model's modules parameters without memory, and clear the hooks. Idempotent."""
        for module, node in self._nodes.items():
            vars(node).pop("_module", None)
            if module._parameters is node._parameters:
                vars(module)["_parameters"] = dict(self._origin[module].parameters)
                if isinstance(node, _TellingNode):
                    for name, param in self._origin[module].parameters.items():
                        setattr(module, name, param)
        for unit in hooks:
            unit.clear()


def _node_of(module: nn.Module, parts: Parts) -> nn.Module:
    base = _TellingNode if _needs_telling(module) else _Node
    node = _node_class(type(module).__name__, base)()
    vars(node)["_parameters"] = dict(parts.parameters)
    vars(node)["_buffers"] = module._buffers
    return node

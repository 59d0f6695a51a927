"""Ways to a model's parameters through the objects of a program, in every form that a later generation does not have.

The next generation has other parameters in the same places: in the model's modules, and in the optimizer's groups. Any
other reference to a present one is to nothing then. It may be the parameter itself, in a list or as a key of a dict. It
may be a view of its memory, a weak reference, its `id()` or `data_ptr()`, or an attribute that was set on it.

A user's loop may hold a parameter in its own variables, where nothing can be looked for: using it is an error then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from raysharded.actors.model.sharded_model import clean_name, local_of
from raysharded.actors.task_calls.object_contents import own_attributes, reachable
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.errors import TaskError

_OF_PARAMETERS = frozenset(("_is_param",))
"""Attributes of torch's on a parameter of another class than its own."""


class ParameterForms:
    """All forms in which an object may refer to one of these parameters."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self._objects = {id(param): name for name, param in named.items()}
        memory = {name: local_of(param) for name, param in named.items()}
        self._storages = {local.untyped_storage()._cdata: name for name, local in memory.items()}
        self._numbers = {**{local.data_ptr(): name for name, local in memory.items()}, **self._objects}
        self._numbers.pop(0, None)  # the address of what has no memory

    def ways_from(self, root: object, without: Collection[object] = ()) -> Iterator[tuple[str, str]]:
        """(way to a reference, as written in Python; the parameter's name). `without`: what is not followed."""
        for path, found in reachable(root, without=without, numbers=self._numbers):
            name = self._named_by(found)
            if name is None and isinstance(found, dict):
                name = next(filter(None, map(self._named_by, found)), None)
            if name is not None:
                yield path, name

    def _named_by(self, found: object) -> str | None:
        """Name of the parameter that is meant by an object itself."""
        match found:
            case bool():
                return None
            case int():
                return self._numbers.get(found)
            case weakref.ref():
                return self._objects.get(id(found()))
            case torch.Tensor() if id(found) not in self._objects:
                return self._storages.get(_storage_of(found))
        return self._objects.get(id(found))

    def ways_from_modules(self, model: nn.Module) -> set[str]:
        """Ways through what the model's modules have besides parameters, buffers and modules."""
        modules = dict(model.named_modules())
        own = {name: own_attributes(module) for name, module in modules.items()}
        return {path for path, _ in self.ways_from(own, without=list(modules.values()))}


def attributes_of(model: nn.Module) -> Mapping[str, Mapping[str, object]]:
    """Attributes that were set on the model's parameters, by the parameter's name."""
    return {name: dict(vars(param)) for name, param in model.named_parameters()}


def lost_attributes(
    own: Mapping[str, torch.Tensor], sharded: Mapping[str, nn.Parameter]
) -> dict[int, dict[str, object]]:
    """Attributes that were set on sharded parameters, by the id of the tensor that an optimizer has in their place."""
    return {
        id(one): {key: value for key, value in vars(sharded[name]).items() if key not in _OF_PARAMETERS}
        for name, one in own.items()
        if one is not sharded[name]
    }


def changed_attributes(before: Mapping[str, Mapping[str, object]], model: nn.Module) -> list[str]:
    """Ways to attributes of parameters that were set since."""
    return [
        f"model.{name}.{key}"
        for name, attributes in attributes_of(model).items()
        for key, value in attributes.items()
        if key not in before[name] or before[name][key] is not value
    ]


def _storage_of(tensor: torch.Tensor) -> int:
    """Identity of a tensor's memory; 0 if it has none."""
    try:
        return int(local_of(tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, and tensors that stand for others
        return 0


_OF_THE_FORM = frozenset(
    {
        *(getattr(torch.Tensor, name) for name in ("numel", "size", "dim", "element_size", "is_floating_point")),
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("shape", "dtype", "ndim", "requires_grad", "is_meta", "is_leaf", "device")
        ),
    }
)
"""Functions that read a tensor's form, which stays the same."""


def refuse_use(parameters: Iterable[torch.Tensor], when: str) -> None:
    """Let each use of these parameters raise a TaskError. `when`: where they are from, for the error."""
    for param in parameters:
        param.__class__ = _released(type(param), when)


@cache
def _released(kind: type[torch.Tensor], when: str) -> type[torch.Tensor]:
    def refuse(_: type, func: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_THE_FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise TaskError(
            f"{line_here()}: a parameter {when} was used: the model has other parameters after each change of the "
            "workers. Take them from model.parameters() or optimizer.param_groups when you need them, and give each "
            "one to the one optimizer of session.shard."
        )

    return type(f"Released{kind.__name__}", (kind,), {"__torch_function__": classmethod(refuse)})


class AssignedMemory:
    """The memory of local shards, from which FSDP2 gathers, and which `param.data = ...` leaves behind."""

    def __init__(self, own: Mapping[str, torch.Tensor], sharded: Mapping[str, nn.Parameter]) -> None:
        """`own`: the tensors that the optimizer steps, which lie in the memory of `sharded`; by name."""
        self._own, self._sharded = own, sharded
        self._homes = {name: local_of(sharded[name]).detach() for name in own}

    @property
    def is_waiting(self) -> bool:
        """True if something was assigned that `take` has not copied yet."""
        homes = self._homes.items()
        return any(self._own[name].data_ptr() != home.data_ptr() and home.numel() > 0 for name, home in homes)

    def take(self) -> None:
        """Copy what was assigned to the optimizer's tensors to their place, and let them lie there again."""
        for name, home in self._homes.items():
            own = self._own[name]
            if own.data_ptr() != home.data_ptr() and own.numel():
                home.copy_(own.detach())
                own.data = home

    def elsewhere(self) -> str:
        """The name of a model's parameter that lies elsewhere now; empty if there is none."""
        shards = ((name, local_of(self._sharded[name]), home) for name, home in self._homes.items())
        return next((name for name, now, home in shards if now.data_ptr() != home.data_ptr() and home.numel()), "")


class ParameterPlaces:
    """The places of one generation's parameters in the modules of a model, to find one that a loop has replaced."""

    def __init__(self, model: nn.Module) -> None:
        places: list[tuple[str, nn.Module, list[nn.Parameter | None]]] = []
        children: list[tuple[str, nn.Module, str, nn.Module]] = []
        for prefix, module in model.named_modules():
            if module._parameters:
                places.append((prefix, module, list(module._parameters.values())))
            for key, child in module._modules.items():
                if child is not None and any(True for _ in child.parameters()):
                    children.append((prefix, module, key, child))
        self._places, self._children = tuple(places), tuple(children)

    def replaced(self) -> str:
        """The name of a parameter, or of a module with parameters, that is another object now; empty if none is."""
        for prefix, module, key, child in self._children:
            if module._modules.get(key) is not child:
                return clean_name(f"{prefix}.{key}".lstrip("."))
        for prefix, module, known in self._places:
            own = module._parameters
            if len(own) != len(known) or any(a is not b for a, b in zip(own.values(), known, strict=True)):
                different = [key for key, one in own.items() if not any(one is each for each in known)]
                return clean_name(f"{prefix}.{next(iter(different), '')}".strip("."))
        return ""


class FormerMemory:
    """Memory of an earlier generation's parameters, without holding it: what a loop's variables keep alive is found.

    A view of a parameter, as `param.detach()`, is a plain tensor, whose use cannot be refused. Training thread only.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[str, weakref.ref[torch.Tensor], StorageWeakRef]] = []
        self._num_steps = 0

    def note(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Note the memory of a generation that ends, beside that of earlier ones that is still alive."""
        self._noted = [one for one in self._noted if not one[2].expired()]
        self._noted += [
            (name, weakref.ref(param), StorageWeakRef(local_of(param).untyped_storage()))
            for name, param in parameters.items()
            if local_of(param).numel()
        ]
        self._num_steps = 0

    def end_step(self, present: Callable[[], Iterable[torch.Tensor]]) -> str:
        """The name of a parameter of which the loop keeps a view, in the second step of a generation; otherwise empty.

        By then variables that a loop assigns in each step are of this generation. Parameters that a loop keeps
        themselves are none: their use is refused. `present`: returns this generation's parameters.
        """
        if not self._noted:
            return ""
        self._num_steps += 1
        if self._num_steps < _SETTLED:
            return ""
        noted, self._noted = self._noted, []
        alive = [(name, param(), memory.cdata) for name, param, memory in noted if not memory.expired()]
        used = {_storage_of(param) for param in present()} if alive else set()
        used |= {memory for _, param, memory in alive if param is not None}
        return next((name for name, _, memory in alive if memory not in used), "")


_SETTLED = 2
"""Number of a generation's step behind which nothing of the one before is in a variable that each step assigns."""

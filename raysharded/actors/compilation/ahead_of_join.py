"""Compilation of blocks before a worker joins, for the calls that the run's workers have seen.

Each worker writes a unit's arguments under `compiled/` in the run's folder, a small file for each new call. A starting
worker makes each unit alone, on a mesh of one worker, and calls it with zeros. torch caches compiled code by the
block's code, so the model that is made later uses it. Otherwise all workers would wait for a joiner's compiler.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from raysharded.actors.comm.device_mesh import forget
from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.in_place.fsdp_tree import FsdpTree, origin_of
from raysharded.actors.in_place.unit_hooks import UnitHooks
from raysharded.actors.model.build import build_on_meta, find_units, mixed_precision
from raysharded.actors.model.modes import Modes
from raysharded.actors.model.sharded_model import clean_name
from raysharded.checkpoint import Storage
from raysharded.config import EngineConfig
from raysharded.errors import text_of
from raysharded.protocol.job import COMPILED_FOLDER
from raysharded.task import Task

_log = logging.getLogger("raysharded.worker")
_MOST_BYTES = 1 << 16
"""Largest size of one file."""
_PLAIN = (bool, int, float, str, type(None))
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
Tree: TypeAlias = Mapping[str, Any]
"""A call's arguments as JSON: tensors by shape, dtype and whether they need a gradient."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a unit's call, without the values of tensors."""

    text: str
    """JSON with the fields `unit`, `args` and `kwargs`."""

    @classmethod
    def of(cls, unit: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
        """The call of a unit with these arguments; None if one of them cannot be stored."""
        try:
            found = {"unit": unit, "args": _tree(tuple(args)), "kwargs": _tree(dict(kwargs))}
        except TypeError:
            return None
        return cls(json.dumps(found, sort_keys=True))

    @property
    def unit(self) -> str:
        """The unit's name."""
        return str(json.loads(self.text)["unit"])

    def arguments(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments; tensors hold zeros."""
        found = json.loads(self.text)
        return _value(found["args"], device), _value(found["kwargs"], device)

    def tell(self, storage: Storage) -> None:
        """Write the call to the run's folder, for workers that start later."""
        digest = blake2b(self.text.encode(), digest_size=8).hexdigest()
        storage.put_if_absent(f"{COMPILED_FOLDER}/{digest}.json", self.text.encode())


def told(storage: Storage) -> list[Call]:
    """The calls that the run's workers have written, in the order of their file names."""
    return [Call(storage.read(key, size=_MOST_BYTES).decode()) for key in sorted(storage.list(COMPILED_FOLDER))]


def compile_ahead(task: Task, config: EngineConfig, calls: Sequence[Call], device: torch.device, seed: int = 0) -> int:
    """Compile the units of the task's model for these calls; return how many. Failed ones are compiled later."""
    done = 0
    with _mesh_of_one(device) as mesh:
        model = build_on_meta(task, config, seed).model
        names = {clean_name(name): module for name, module in model.named_modules()}
        units = set(find_units(task, config, model))
        Modes(model).train()
        for call in calls:
            try:
                block = names[call.unit]
                if block in units:
                    _call(block, config, call, mesh, device)
                    done += 1
            except Exception as error:  # noqa: BLE001 - the task's code, called with zeros; it is compiled later
                _log.info("unit %s was not compiled ahead: %s", call.text[:100], text_of(error))
        forget(mesh)
    return done


def _call(block: nn.Module, config: EngineConfig, call: Call, mesh: DeviceMesh, device: torch.device) -> None:
    """Run a unit's forward and backward like its first call in the run."""
    if block._compiled_call_impl is None:
        block._apply(lambda tensor: torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
        block.compile()
        tree, hooks = FsdpTree(block, origin_of(block)), UnitHooks(block)  # the code that is cached calls these hooks
        fully_shard(tree.root, mesh=mesh, mp_policy=mixed_precision(config, is_root=False))
        tree.attach([hooks])
    args, kwargs = call.arguments(device)
    found = block(*args, **kwargs)
    outputs = [one for one in tensors_in(found) if one.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.zeros_like(one) for one in outputs])
    block.zero_grad()


@contextmanager
def _mesh_of_one(device: torch.device) -> Iterator[DeviceMesh]:
    dist.init_process_group(
        accelerator().backend if accelerator().has(device) else "gloo", store=HashStore(), rank=0, world_size=1
    )
    try:
        yield init_device_mesh(device.type, (1,))
    finally:
        dist.destroy_process_group()


def _tree(value: Any) -> Tree:
    match value:
        case torch.Tensor():
            dtype = str(value.dtype).removeprefix("torch.")
            return {"tensor": [list(value.shape), dtype, value.requires_grad]}
        case dict():
            return {"dict": {str(key): _tree(one) for key, one in value.items()}}
        case list() | tuple():
            return {"list" if isinstance(value, list) else "tuple": [_tree(one) for one in value]}
        case _ if type(value) in _PLAIN:
            return {"value": value}
    raise TypeError(f"{type(value)} cannot be stored")


def _value(tree: Tree, device: torch.device) -> Any:
    match tree:
        case {"tensor": [shape, dtype, needs_gradient]}:
            return torch.zeros(shape, dtype=_DTYPES[dtype], device=device, requires_grad=needs_gradient)
        case {"dict": items}:
            return {key: _value(one, device) for key, one in items.items()}
        case {"list": items}:
            return [_value(one, device) for one in items]
        case {"tuple": items}:
            return tuple(_value(one, device) for one in items)
        case {"value": value}:
            return value
    raise ValueError(f"{tree} is not a stored argument")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results, in order."""
    match value:
        case torch.Tensor():
            yield value
        case dict():
            for one in value.values():
                yield from tensors_in(one)
        case list() | tuple():
            for one in value:
                yield from tensors_in(one)

"""The model of a session between `session.build` and `session.shard`: its parameters have no memory there.

First weights are drawn in `make()`, or by `init_weights`. Values that a loop writes in between would be lost, so a
write raises an error. So does a change of the model's parts, as `make()` is called again for the values. Buffers, and
tensors in attributes, have memory, but their values are from that call, too. In `shard` the model gets other
parameters: those that the loop has kept from before are of no generation.
"""

from __future__ import annotations

import torch
from torch import nn

from raysharded.actors.device.device_waits import numbers_of
from raysharded.actors.model.constants import constants_of
from raysharded.actors.model.construction import Construction
from raysharded.actors.model.meta_watch import REMEDY, WriteWatch, storage_of
from raysharded.actors.model.parameter_marks import share
from raysharded.actors.model.sharded_model import clean_name
from raysharded.actors.numerics.bit_digest import tensor_digest
from raysharded.actors.optimizer.built_optimizer import BuiltOptimizer
from raysharded.actors.optimizer.held_parameters import refuse_use
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.errors import TaskError


class BuiltModel:
    """A model, from `session.build` to `session.shard`. Thread of the function only."""

    def __init__(self, construction: Construction) -> None:
        self.construction, self.model = construction, construction.model
        model = self.model
        self._built = _parts_of(model)
        self._values = _values_of(model)
        names = {storage_of(param): clean_name(name) for name, param in model.named_parameters()}
        self._watch = WriteWatch(names)
        self._watch.__enter__()  # type: ignore[no-untyped-call]  # torch has no types there

    def end(self) -> None:
        """Look for writes no longer. Raises TaskError if the model has other parameters, or other values of buffers and
        of tensors in attributes, than `make()` returned."""
        self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has no types there
        now = _parts_of(self.model)
        for name, (param, *form) in now.items():
            if name not in self._built:
                raise TaskError(f"{line_here()}: the parameter {name!r} was added behind session.build. {REMEDY}")
            was, *before = self._built[name]
            if param is not was or form != before:
                raise TaskError(
                    f"{line_here()}: the parameter {name!r} was replaced, tied or converted behind session.build. "
                    f"{REMEDY}"
                )
        missing = sorted(self._built.keys() - now.keys())
        if missing:
            raise TaskError(f"{line_here()}: the parameter {missing[0]!r} was removed behind session.build. {REMEDY}")
        values = _values_of(self.model)
        changed = next((path for path, one in self._values.items() if values.get(path, one) != one), None)
        if changed is not None:
            raise TaskError(
                f"{line_here()}: values of {changed!r}, a buffer or a tensor of the model, were changed behind "
                "session.build. They would be lost: the function that session.build calls is called again for the "
                f"values. {REMEDY}"
            )

    def renew(self, optimizer: BuiltOptimizer) -> None:
        """Give the model and the optimizer other parameters without memory; the former ones refuse to be used."""
        renewed: dict[nn.Parameter, nn.Parameter] = {}
        for module in self.model.modules():
            for name, param in list(module._parameters.items()):
                if param is not None:
                    if param not in renewed:
                        renewed[param] = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
                        share(param, renewed[param])
                    setattr(module, name, renewed[param])
        optimizer.exchange({name: param for name, (param, *_) in _parts_of(self.model).items()})
        refuse_use(renewed, "from before session.shard")


def _parts_of(model: nn.Module) -> dict[str, tuple[nn.Parameter, torch.dtype, torch.Size]]:
    """Each parameter and its form by every name that it has: tied ones have several."""
    named = model.named_parameters(remove_duplicate=False)
    return {clean_name(name): (param, param.dtype, param.shape) for name, param in named}


def _values_of(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size, int]]:
    """Type, shape and digest of each buffer, and of each tensor or array that modules hold elsewhere, by its path."""
    tensors = dict(model.named_buffers()) | {path: one.value for path, one in constants_of(model).items()}
    with_values = {
        path: one
        for path, one in tensors.items()
        if one.layout is torch.strided and not one.is_meta and not one.is_quantized
    }
    digests = numbers_of(map(tensor_digest, with_values.values()))
    return {
        path: (one.dtype, one.shape, digest) for (path, one), digest in zip(with_values.items(), digests, strict=True)
    }

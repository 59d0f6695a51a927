"""Finds a buffer that a forward pass changed: what it holds would depend on the number of workers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from raysharded.actors.bits import some_of, tensor_digest
from raysharded.actors.sharded_model import clean_name
from raysharded.errors import InexactError


class BufferWatch:
    """Finds a buffer that a forward pass changed.

    Torch counts most changes, but not those through `.data`, nor those that batch-norm makes: so some of the elements
    are compared now and then, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._versions()
        self._bits = self._some_bits()
        self._compared: set[str] = set()

    def _versions(self) -> dict[str, object]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._model.named_buffers()}

    def _some_bits(self) -> dict[str, object]:
        return {
            name: int(tensor_digest(some_of(buffer)).item())
            for name, buffer in self._model.named_buffers()
            if buffer.layout is torch.strided and not buffer.is_quantized and type(buffer) is torch.Tensor
        }

    def check(self, after: str, step: int) -> None:
        """Raise `InexactError` naming the first buffer that is not what it was. Elements are compared the first time
        `after` something, and after the steps 1, 2, 4, 8, ..."""
        self._compare(self._before, self._versions())
        is_power_of_two = step & (step - 1) == 0
        if is_power_of_two or after not in self._compared:
            self._compared.add(after)
            self._compare(self._bits, self._some_bits())

    def _compare(self, before: Mapping[str, object], now: Mapping[str, object]) -> None:
        for name, value in now.items():
            if before.get(name) != value:
                raise InexactError(
                    f"buffer {clean_name(name)!r} changed during forward; what it holds would depend on the number of "
                    "workers. Compute it from the inputs instead, or give up identical bits with "
                    'EngineConfig(reduction="fast").'
                )

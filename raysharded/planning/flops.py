"""Counts floating-point operations by torch's own formulas.

torch's `FlopCounterMode` also follows modules, and with that keeps tensors alive for longer than a training step does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from raysharded.planning.tensor_axis import is_of_dtensors

_aten = torch.ops.aten
_AS = {  # the attention of CPUs has no formula of its own
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


class FlopCount(TorchDispatchMode):
    """While it is entered, `total` grows; real and fake tensors alike."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_of_dtensors(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        formula = flop_registry.get(_AS.get(packet, packet))
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result

"""One pass over a step's microbatches: its digests, to compare it with other passes; and other memory for the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from raysharded.actors.device.device_waits import numbers_of
from raysharded.actors.numerics.bit_digest import bits_of, combined, tensor_digest
from raysharded.actors.step.forward_backward import Results

NOT_FINITE = 1
"""Replacement of the digests of a microbatch whose loss or gradient is not finite: the bits of a NaN mean nothing."""

_SMALLEST, _LARGEST, _OF_EACH_SIZE = 6, 20, 4
"""Powers of two, in bytes, of the blocks that are allocated and freed before a microbatch is computed again."""

PARTS = ("gradient", "loss", "metric")
"""Parts of a microbatch's results, in the order in which a difference is reported."""


@dataclass(slots=True)
class Pass:
    """The gradients, losses and metrics of the microbatches that this worker computed."""

    shift: int = 0
    """Each worker computes the microbatches of the worker this many places further."""
    looks_for_not_finite: bool = False
    """True to report `NOT_FINITE`; otherwise a NaN is compared by its bits, like any number."""
    results: Results | None = None
    _gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Microbatch -> digest of each unit's gradient, in the order of the backward; nothing waits for the device."""
    _largest: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Microbatch -> largest magnitude in each unit's gradient, if `looks_for_not_finite`."""

    def note(self, index: int, gradient: torch.Tensor) -> None:
        """Note one unit's gradient of a microbatch."""
        self._gradients.setdefault(index, []).append(tensor_digest(gradient))
        if self.looks_for_not_finite and gradient.numel():
            largest = torch.linalg.vector_norm(gradient.detach().flatten(), math.inf)
            self._largest.setdefault(index, []).append(largest)

    def digests(self) -> dict[int, int]:
        """Microbatch -> one digest of all parts."""
        return {index: combined(parts) for index, parts in self.parts().items()}

    def parts(self) -> dict[int, tuple[int, ...]]:
        """Microbatch -> digests of the parts in `PARTS`; never 0."""
        values = self.results.by_microbatch() if self.results else {}
        found = {}
        for index, units in self._gradients.items():
            parts = (
                combined(numbers_of(units)),
                combined(map(bits_of, values[index][:2])),
                combined(map(bits_of, values[index][2:])),
            )
            largest = [*values[index][:2], *map(float, numbers_of(self._largest.get(index, ())))]
            is_finite = not self.looks_for_not_finite or all(map(math.isfinite, largest))
            found[index] = parts if is_finite else (NOT_FINITE,) * len(parts)
        return found


def stir_memory(device: torch.device) -> None:
    """Let much of the memory allocated next hold other numbers than at its last allocation. Takes milliseconds."""
    held = [
        torch.full((1 << power,), 0x5B, dtype=torch.uint8, device=device)
        for power in range(_LARGEST, _SMALLEST - 1, -1)
        for _ in range(_OF_EACH_SIZE)
    ]
    held.clear()

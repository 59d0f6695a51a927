"""The blocks of a model that are units where a task does not choose: those of its outermost lists of blocks.

A list may hold lists: stages of blocks, as Swin, ConvNeXt and U-Nets have them. FSDP2 gathers a unit's weights when its
forward is called, so what has no forward of its own is looked into: a `ModuleList`, a `ModuleDict`, and a bare
`nn.Module` that blocks were assigned to. A `Sequential` has one, and is a block.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def default_units(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks of every outermost `ModuleList` that have parameters, in order; one that occurs twice comes twice."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from _blocks_of(child)
        else:
            yield from default_units(child)


def has_forward(module: nn.Module) -> bool:
    """True if calling the module computes something."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _blocks_of(container: nn.Module) -> Iterator[nn.Module]:
    """`children` gives what occurs twice once."""
    for block in container._modules.values():
        if block is None or next(block.parameters(), None) is None:
            continue
        if has_forward(block):
            yield block
        else:
            yield from _blocks_of(block)

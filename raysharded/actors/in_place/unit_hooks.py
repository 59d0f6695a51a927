"""Hooks of the engine on a unit, in four places that are the same for the life of the unit's module.

torch's own hooks are registered once, when the model is built; each generation fills the places and clears them. So the
user's hooks keep their order among them, and nothing of an older generation is called. A compiled block keeps the hooks
that it was compiled with, and they are always these. They are not compiled: their code would depend on the places.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from raysharded.actors.task_calls.object_contents import NotFollowed

PreHook: TypeAlias = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Called with (module, args, kwargs); returns None, or other (args, kwargs)."""
PostHook: TypeAlias = Callable[[nn.Module, tuple[Any, ...], Any], Any]
"""Called with (module, args, output); returns None, or another output."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One function in its place."""

    place: list[Any]
    hook: Any

    def remove(self) -> None:
        """Take the function out of its place. Idempotent."""
        with suppress(ValueError):
            self.place.remove(self.hook)


class UnitHooks(NotFollowed):
    """The places of one unit."""

    def __init__(self, module: nn.Module) -> None:
        """Register torch's hooks: those of the engine are around those that the module has."""
        self.module = module
        self._before: list[PreHook] = []
        self._gathered: list[PreHook] = []
        self._computed: list[PostHook] = []
        self._end: list[PostHook] = []
        module.register_forward_pre_hook(self._call_before, prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(self._call_gathered, with_kwargs=True)
        module.register_forward_hook(self._call_computed, prepend=True)
        module.register_forward_hook(self._call_end)

    def gather_with(self, node: nn.Module) -> None:
        """Call the hooks of the node that FSDP2 has wrapped: the last ones before a forward, the first at its end."""
        self._before += node._forward_pre_hooks.values()
        self._end[:0] = node._forward_hooks.values()

    def before_gather(self, hook: PreHook) -> Placed:
        """Call `hook` first of all, before FSDP2 gathers the unit's weights and casts its inputs."""
        self._before.insert(0, hook)
        return Placed(self._before, hook)

    def before_forward(self, hook: PreHook) -> Placed:
        """Call `hook` with gathered weights, after the user's hooks."""
        self._gathered.append(hook)
        return Placed(self._gathered, hook)

    def after_forward(self, hook: PostHook) -> Placed:
        """Call `hook` with weights that are still gathered, before the user's hooks."""
        self._computed.insert(0, hook)
        return Placed(self._computed, hook)

    def at_end(self, hook: PostHook) -> Placed:
        """Call `hook` last of all."""
        self._end.append(hook)
        return Placed(self._end, hook)

    def clear(self) -> None:
        """Take everything out of the places: the generation is over."""
        for place in (self._before, self._gathered, self._computed, self._end):
            place.clear()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def _call_before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _call_pre(self._before, module, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def _call_gathered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _call_pre(self._gathered, module, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def _call_computed(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _call_post(self._computed, module, args, output)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def _call_end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _call_post(self._end, module, args, output)


def _call_pre(hooks: list[PreHook], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for hook in hooks:
        given = hook(module, args, kwargs)
        if given is not None:
            args, kwargs = given
    return args, kwargs


def _call_post(hooks: list[PostHook], module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    for hook in hooks:
        given = hook(module, args, output)
        if given is not None:
            output = given
    return output

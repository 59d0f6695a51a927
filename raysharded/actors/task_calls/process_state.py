"""Settings of torch for a whole process, or thread, that a task's `build_...` methods may leave changed.

A run's numbers depend on them, and nothing shows it. So they are restored, with one remark on the task. Settings that
torch cannot restore get a remark as well. Filters of warnings, environment variables and other libraries' settings are
not restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _device
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode as _pop_dispatch_mode,
    _push_mode as _push_dispatch_mode,
)

from raysharded.actors.task_calls.remarks import Say
from raysharded.errors import TaskError

STAYS_CHANGED = {1: True, 2: False, 3: False}
"""By the number of the rule `modes`: True if settings that `build_model` and `build_optimizer` left changed stay so."""


class _Setting(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], object] | None
    """None: torch sets it once."""


class _FunctionModes(NamedTuple):
    """The torch function modes of this thread; the default device is one."""

    stack: tuple[TorchFunctionMode, ...]
    """Modes of the stack, the outermost first."""
    of_default: DeviceContext | None
    """Mode of `torch.set_default_device`."""
    device: torch.device | None

    @classmethod
    def now(cls) -> _FunctionModes:
        of_default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        return cls(tuple(_get_current_function_mode_stack()), of_default, _device.CURRENT_DEVICE)

    def set(self) -> None:
        for _ in _get_current_function_mode_stack():
            _pop_mode()
        for mode in self.stack:
            _push_mode(mode)
        torch._GLOBAL_DEVICE_CONTEXT.device_context = self.of_default
        _device.CURRENT_DEVICE = self.device

    def __str__(self) -> str:
        names = [str(mode.device) if isinstance(mode, DeviceContext) else type(mode).__name__ for mode in self.stack]
        return ", ".join(names) or "cpu"


class _DispatchModes(NamedTuple):
    """The torch dispatch modes of this thread, including those of profilers and counters."""

    stack: tuple[TorchDispatchMode, ...]
    """Modes of the stack, the outermost first."""

    @classmethod
    def now(cls) -> _DispatchModes:
        return cls(tuple(_get_current_dispatch_mode_stack()))

    def set(self) -> None:
        for _ in _get_current_dispatch_mode_stack():
            _pop_dispatch_mode()
        for mode in self.stack:
            _push_dispatch_mode(mode)

    def __str__(self) -> str:
        return ", ".join(type(mode).__name__ for mode in self.stack) or "none"


_guards: list[torch.inference_mode] = []
"""Guards that were entered to leave a mode: torch returns to it when one is freed."""


def _set_inference_mode(enabled: bool) -> None:
    guard = torch.inference_mode(enabled)
    guard.__enter__()
    _guards.append(guard)


def _set_filling(enabled: bool) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = enabled  # type: ignore[attr-defined]


def _set_benchmark(enabled: bool) -> None:
    torch.backends.cudnn.benchmark = enabled


_SETTINGS: Mapping[str, _Setting] = {
    "the default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "inference mode": _Setting(torch.is_inference_mode_enabled, _set_inference_mode),  # which sets grad mode, too
    "grad mode": _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "the default device": _Setting(_FunctionModes.now, _FunctionModes.set),
    "the dispatch modes": _Setting(_DispatchModes.now, _DispatchModes.set),
    "deterministic algorithms (debug mode)": _Setting(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    ),
    "filling of uninitialized memory": _Setting(
        lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        _set_filling,
    ),
    "cudnn.benchmark": _Setting(lambda: torch.backends.cudnn.benchmark, _set_benchmark),
    "the float32 matmul precision": _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "the number of threads": _Setting(torch.get_num_threads, torch.set_num_threads),
    "the number of threads between operations": _Setting(torch.get_num_interop_threads, None),
}
"""Settings in the order in which they are restored."""


class Left:
    """Settings that a call of the task's code left changed; empty before that has ended."""

    def __init__(self) -> None:
        self._changes: dict[str, tuple[Any, Any]] = {}
        """Name -> (before, after)."""

    def note(self, before: Mapping[str, Any]) -> None:
        """Record the settings that differ from before."""
        now = _read()
        self._changes = {name: (value, now[name]) for name, value in before.items() if now[name] != value}

    def set_again(self) -> None:
        """Set the changes again, in this thread: for a run under number 1 of the rule."""
        _write({name: after for name, (_, after) in self._changes.items()})

    def remark(self, where: str, say: Say) -> None:
        """Report the changes. `where`: the method that was called."""
        if self._changes:
            told = "; ".join(_shown(name, *change) for name, change in self._changes.items())
            say(
                f"left changed by {where}",
                f"{where} left {told}: this holds for the whole process, and was put back. Put back yourself what is "
                "meant for the building alone; set what is meant for the whole run where the module that defines the "
                "task is imported.",
            )


@contextmanager
def put_back() -> Iterator[Left]:
    """A context around a call of the task's code, in its thread, that restores the settings. Takes some 10 us."""
    left, before = Left(), _read()
    try:
        yield left
    finally:
        left.note(before)
        _write(before)


_OF_BITS = (
    *("the default dtype", "the default device", "deterministic algorithms (debug mode)", "cudnn.benchmark"),
    *("the float32 matmul precision", "the number of threads"),
)
"""Settings that change the bits of later steps."""


@contextmanager
def refusing_changes(where: str) -> Iterator[None]:
    """A context for a call of the task's code, which raises TaskError if it leaves a setting changed.

    Nothing is put back. A worker that joins, or a run that resumes, would compute without the change. Takes some 10 us.
    """
    before = {name: _SETTINGS[name].read() for name in _OF_BITS}
    yield
    for name, was in before.items():
        if (now := _SETTINGS[name].read()) != was:
            raise TaskError(
                f"{where} left {_shown(name, was, now)}: later steps would be computed with it, and not by a worker "
                "that joins or a run that resumes. Set it back in a `finally`, or set it for the whole run where the "
                "module that defines the task is imported."
            )


def _read() -> dict[str, Any]:
    return {name: setting.read() for name, setting in _SETTINGS.items()}


def _write(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setting = _SETTINGS[name]
        if setting.write is not None and setting.read() != value:
            setting.write(value)


def _shown(name: str, before: Any, after: Any) -> str:
    stays = ", which stays, as torch sets it once" if _SETTINGS[name].write is None else ""
    return f"{name} at {after} (before: {before}{stays})"

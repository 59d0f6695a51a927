"""Settings of torch that hold for a whole process, or thread, and that a task's `build_...` methods may leave changed.

A run's numbers depend on them, and on nothing that says so: they are put back, and the task is told once. What torch
cannot put back is told as well. Filters of warnings, environment variables and other libraries' settings are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _device
from torch.utils._device import DeviceContext

from raysharded.actors.notes import Say

PUTS_BACK = {1: False, 2: True}
"""By the number of the rule `modes`: whether what is left changed is put back."""


class _Setting(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], object] | None
    """None: torch sets it once."""


class _FunctionModes(NamedTuple):
    """The torch function modes of this thread; the default device is one."""

    stack: tuple[TorchFunctionMode, ...]
    """The outermost first."""
    of_default: DeviceContext | None
    """That of `torch.set_default_device`."""
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


_guards: list[torch.inference_mode] = []
"""That were entered to leave a mode: torch goes back to it when one is freed."""


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
"""In the order in which they are put back."""


@contextmanager
def put_back(where: str, say: Say | None = None, *, number: int = max(PUTS_BACK)) -> Iterator[None]:
    """Around a call of the task's code, in its thread: what that left changed is as before afterwards.

    `where`: what is called, for the remark; `say`: None where nobody listens. `number`: of the rule. Takes some 10 us.
    """
    if not PUTS_BACK[number]:
        yield
        return
    before = {name: setting.read() for name, setting in _SETTINGS.items()}
    try:
        yield
    finally:
        left = _put_back(before)
    if left and say is not None:
        say(f"left behind by {where}", _remark(where, left))


def _put_back(before: Mapping[str, Any]) -> list[str]:
    """Set what differs; a phrase for each."""
    now = {name: setting.read() for name, setting in _SETTINGS.items()}
    left = []
    for name, setting in _SETTINGS.items():
        if now[name] == before[name]:
            if setting.write is not None and setting.read() != before[name]:  # another's putting back changed it
                setting.write(before[name])
            continue
        stays = ""
        if setting.write is None:
            stays = ", which stays, as torch sets it once"
        else:
            setting.write(before[name])
        left.append(f"{name} at {now[name]} (before: {before[name]}{stays})")
    return left


def _remark(where: str, left: list[str]) -> str:
    return (
        f"{where} left {'; '.join(left)}: this holds for the whole process, and was put back. Put back yourself what "
        "is meant for the building alone; set what is meant for the whole run where the module that defines the task "
        "is imported."
    )

"""Health of this machine's GPUs, from NVIDIA's management library (NVML), where its Python module is installed.

A thread waits for critical events of the driver (Xid). Counters of memory errors, the reasons for lower clocks and the
use of a GPU are read on request. Loads no torch. NVML also shows the GPUs that CUDA_VISIBLE_DEVICES hides.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from raysharded.display.quantities import count

_UUID = re.compile(r"GPU-[0-9a-zA-Z-]+")
_MODULES = ("pynvml", "ray._private.thirdparty.pynvml")
_WAIT_MS = 1000
_MOST_ERRORS = 10
"""Errors in a row after which no further events are waited for."""
_MOST_EVENTS = 16
_XID_EVENT, _UNCORRECTED_EVENT = 0x8, 0x2
_UNCORRECTED, _SINCE_BOOT = 1, 0
_POWER_BRAKE, _BY_HARDWARE, _HEAT = 0x80, 0x08, 0x20 | 0x40
"""Bits of NVML's reasons for lower clocks: a brake by the power supply, one by hardware, heat."""
_OF_THE_GPU = {
    48: "an uncorrectable memory error",
    61: "its microcontroller failed",
    62: "its microcontroller stopped",
    63: "memory was replaced by spare rows",
    64: "memory could not be replaced by spare rows",
    74: "an error of NVLink",
    79: "it has fallen off the bus",
    92: "many corrected memory errors",
    94: "an uncorrectable memory error, contained",
    95: "an uncorrectable memory error, not contained",
    119: "its system processor does not answer",
    120: "an error of its system processor",
    140: "an uncorrectable memory error of its processor",
}
"""Xids of the GPU itself."""
_OF_A_PROGRAM = {
    13: "an exception in a kernel",
    31: "an access to memory that is not mapped",
    43: "a program's work was stopped",
    45: "a program's work was removed after an error",
    109: "a program's work took too long to be switched",
}
"""Xids that a program causes, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReport:
    """Complaints about a GPU since its watch began."""

    complaints: tuple[str, ...] = ()
    """Each as an object of the verb "reported"."""
    is_broken: bool = False
    """True if one of them is of the GPU itself: no program causes it."""


@dataclass(slots=True)
class _Watched:
    handle: Any
    memory_errors: int
    """Uncorrectable memory errors since the machine's start, when the watch began."""
    xids: list[int] = field(default_factory=list)


class GpuHealth:
    """The GPUs of this machine that are watched. Any thread."""

    def __init__(self, library: Any = None) -> None:
        """`library`: a module with NVML's functions, initialized; None: the installed one, if there is one."""
        self._nvml = library or _load()
        self._lock = threading.Lock()
        self._watched: dict[str, _Watched] = {}
        self._events: Any = None

    def watch(self, device: str) -> bool:
        """Note the events of a GPU from now on; False if NVML does not show it.

        `device`: text with the GPU's UUID, as `WorkerInfo.device`.
        """
        uuid = _uuid_in(device)
        if self._nvml is None or not uuid:
            return False
        with self._lock, contextlib.suppress(Exception):
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            is_new = uuid not in self._watched
            self._watched[uuid] = _Watched(handle, self._memory_errors(handle))
            if is_new:
                self._register(uuid, handle)
            return True
        return False

    def report(self, device: str) -> GpuReport:
        """Complaints about a GPU since the newest `watch` of it; none if it is not watched."""
        watched = self._watched.get(_uuid_in(device))
        if watched is None:
            return GpuReport()
        xids = tuple(dict.fromkeys(watched.xids))
        complaints = [_xid_text(xid) for xid in xids]
        errors = self._memory_errors(watched.handle) - watched.memory_errors
        if errors > 0:
            complaints.append(count(errors, "uncorrectable memory error"))
        complaints += self._slowdowns(watched.handle)
        return GpuReport(complaints=tuple(complaints), is_broken=errors > 0 or any(xid in _OF_THE_GPU for xid in xids))

    def use(self, device: str) -> dict[str, float]:
        """`used_bytes` of all programs, `utilization` from 0 to 1, `temperature_c`; without those that are unknown."""
        watched, found = self._watched.get(_uuid_in(device)), dict[str, float]()
        if watched is None:
            return found
        with contextlib.suppress(Exception):  # NVML's errors: not supported by this GPU, or it is lost
            found["used_bytes"] = float(self._nvml.nvmlDeviceGetMemoryInfo(watched.handle).used)
        with contextlib.suppress(Exception):
            found["utilization"] = self._nvml.nvmlDeviceGetUtilizationRates(watched.handle).gpu / 100
        with contextlib.suppress(Exception):
            found["temperature_c"] = float(self._nvml.nvmlDeviceGetTemperature(watched.handle, 0))
        return found

    def _register(self, uuid: str, handle: Any) -> None:
        """Begin to wait for a GPU's events. Some GPUs, and virtual ones, have none."""
        with contextlib.suppress(Exception):
            is_first = self._events is None
            if is_first:
                self._events = self._nvml.nvmlEventSetCreate()
            self._nvml.nvmlDeviceRegisterEvents(handle, _XID_EVENT | _UNCORRECTED_EVENT, self._events)
            if is_first:
                threading.Thread(target=self._wait, daemon=True, name=f"events of {uuid}").start()

    def _wait(self) -> None:
        for event in self._arriving():
            with contextlib.suppress(Exception), self._lock:
                uuid = _text(self._nvml.nvmlDeviceGetUUID(event.device))
                watched = self._watched.get(uuid)
                if watched is not None and event.eventType == _XID_EVENT and len(watched.xids) < _MOST_EVENTS:
                    watched.xids.append(int(event.eventData))

    def _arriving(self) -> Iterator[Any]:
        errors = 0
        while errors < _MOST_ERRORS:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, _WAIT_MS)
            except Exception as error:  # noqa: BLE001 - NVML's errors, by the module that is installed
                errors = 0 if "imeout" in f"{type(error).__name__} {error}" else errors + 1
                continue
            errors = 0
            yield event

    def _memory_errors(self, handle: Any) -> int:
        with contextlib.suppress(Exception):  # not every GPU counts them
            return int(self._nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _SINCE_BOOT))
        return 0

    def _slowdowns(self, handle: Any) -> list[str]:
        bits = 0
        with contextlib.suppress(Exception):
            bits = int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        if bits & _HEAT:
            degrees = ""
            with contextlib.suppress(Exception):
                degrees = f" ({int(self._nvml.nvmlDeviceGetTemperature(handle, 0))} °C)"
            return [f"lower clocks because of heat{degrees}"]
        if bits & _POWER_BRAKE:
            return ["lower clocks because of its power supply"]
        return ["lower clocks, set by its hardware"] if bits & _BY_HARDWARE else []


def _load() -> Any:
    """The initialized module; None if there is none, or no driver. Ray has a copy."""
    for name in _MODULES:
        if name.startswith("ray.") and "ray" not in sys.modules:
            continue
        with contextlib.suppress(Exception):
            found = importlib.import_module(name)
            found.nvmlInit()
            return found
    return None


def _uuid_in(device: str) -> str:
    found = _UUID.search(device)
    return found[0] if found else ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _xid_text(xid: int) -> str:
    meaning = _OF_THE_GPU.get(xid) or _OF_A_PROGRAM.get(xid)
    return f"Xid {xid} ({meaning})" if meaning else f"Xid {xid}"

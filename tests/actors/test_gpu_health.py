"""Reports of a GPU's driver, through a double of NVML's module with the functions of Ray's copy."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from ray._private.thirdparty.pynvml import pynvml

from raysharded.actors.gpu_health import GpuHealth
from raysharded.actors.process.death_watch import DeathWatch
from raysharded.actors.process.os_processes import start_ticks
from raysharded.protocol.death import Death
from tests.actors.nvml_double import Gpu, NvmlDouble

A, B = "GPU-aaaa-1", "GPU-bbbb-2"
NAME = f"GPU 3 {A}"
"""As a worker names its GPU."""


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_double_has_the_functions_of_the_module() -> None:
    for name, function in inspect.getmembers(NvmlDouble, inspect.isfunction):
        if name.startswith("nvml"):
            given = inspect.signature(getattr(pynvml, name)).parameters.values()
            theirs = [one for one in given if one.default is one.empty]
            assert len(theirs) == len(inspect.signature(function).parameters) - 1, name
    assert pynvml.nvmlEventTypeXidCriticalError == 0x8
    assert pynvml.nvmlEventTypeDoubleBitEccError == 0x2
    assert (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC) == (1, 0)
    assert pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonSwThermalSlowdown == 0x60
    assert (pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, pynvml.nvmlClocksEventReasonHwSlowdown) == (0x80, 0x8)
    assert "imeout" in str(pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)) + type(pynvml.NVMLError(10)).__name__


def test_an_xid_of_the_gpu_is_its_failure_and_one_of_another_gpu_is_not() -> None:
    mine, other = Gpu(A), Gpu(B)
    nvml = NvmlDouble(mine, other)
    health = GpuHealth(nvml)
    assert health.watch(NAME)
    assert health.watch(B)
    nvml.send(other, 31)
    nvml.send(mine, 79)
    nvml.send(mine, 79)
    eventually(lambda: health.report(NAME).complaints != ())
    assert health.report(NAME).complaints == ("Xid 79 (it has fallen off the bus)",)
    assert health.report(NAME).is_broken
    assert health.report(B).complaints == ("Xid 31 (an access to memory that is not mapped)",)
    assert not health.report(B).is_broken


def test_memory_errors_and_heat_are_reported_since_the_watch_began() -> None:
    gpu = Gpu(A, memory_errors=5, degrees=91)
    health = GpuHealth(NvmlDouble(gpu))
    health.watch(NAME)
    assert health.report(NAME).complaints == ()
    gpu.memory_errors, gpu.slowdown = 7, 0x40
    assert health.report(NAME).complaints == (
        "2 uncorrectable memory errors",
        "lower clocks because of heat (91 °C)",
    )
    assert health.report(NAME).is_broken
    health.watch(NAME)  # by the next worker on it
    assert not health.report(NAME).is_broken


@pytest.mark.parametrize(("bits", "text"), [(0x80, "its power supply"), (0x8, "set by its hardware")])
def test_other_slowdowns_are_named(bits: int, text: str) -> None:
    health = GpuHealth(NvmlDouble(Gpu(A, slowdown=bits)))
    health.watch(A)
    assert text in health.report(A).complaints[0]


def test_a_gpu_without_counters_or_events_has_what_it_has() -> None:
    health = GpuHealth(NvmlDouble(Gpu(A, memory_errors=None, has_events=False)))
    assert health.watch(A)
    assert health.report(A).complaints == ()
    assert health.use(A) == {"used_bytes": float(3 << 30), "utilization": 0.75, "temperature_c": 40.0}


def test_without_nvml_or_a_uuid_nothing_is_reported() -> None:
    health = GpuHealth(NvmlDouble(Gpu(A)))
    assert not health.watch("GPU 3")
    assert not health.watch(B)
    assert health.report(B).complaints == ()
    assert health.use("GPU 3") == {}


def test_the_death_of_a_worker_has_what_its_gpu_reported() -> None:
    """A real process, which its own code ends with a status."""
    gpu = Gpu(A)
    nvml = NvmlDouble(gpu)
    health = GpuHealth(nvml)
    watch = DeathWatch(health=health)
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(6)"], stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    assert watch.watch(process.pid, start_ticks(process.pid) or 0, NAME)
    nvml.send(gpu, 94)
    eventually(lambda: health.report(NAME).is_broken)
    process.stdin.close()
    process.wait()
    death = watch.explain(process.pid)
    assert death is not None
    assert death.gpu == ("Xid 94 (an uncorrectable memory error, contained)",)
    assert death.is_known
    assert not death.is_its_own
    assert death.cause.endswith("; its GPU reported Xid 94 (an uncorrectable memory error, contained)")


def test_a_death_whose_gpu_reported_what_a_program_causes_may_be_its_own() -> None:
    death = Death(signal="SIGABRT", gpu=("Xid 31 (an access to memory that is not mapped)",))
    assert death.is_its_own
    assert "SIGABRT" in death.cause
    assert "its GPU reported Xid 31" in death.cause

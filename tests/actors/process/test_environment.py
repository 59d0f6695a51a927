"""The settings of a worker's process."""

from __future__ import annotations

import ctypes
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from raysharded.actors.process import environment
from raysharded.actors.process.environment import keep_freed_memory
from raysharded.errors import RayshardedError
from raysharded.ids import WorkerId
from tests.forked import in_a_fork
from tests.training.harness import Collector, make_driver, make_job, make_limits

SIZE = 30_000_000


class Info(ctypes.Structure):
    """See mallinfo(3)."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def of_memory(make: Callable[[], object]) -> tuple[int, int]:
    """(bytes that the system maps for it alone, bytes that are kept when it is freed)."""
    info = ctypes.CDLL(None).mallinfo2
    info.restype = Info
    keep_freed_memory()
    before = info()
    made = make()
    held = info()
    del made
    return held.hblkhd - before.hblkhd, info().fordblks - held.fordblks


def test_the_memory_of_a_tensor_that_is_freed_is_kept() -> None:
    assert not [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))], "for the allocator"
    mapped, kept = in_a_fork(of_memory, partial(torch.ones, SIZE, dtype=torch.uint8))
    assert mapped == 0
    assert kept > 0.9 * SIZE


def test_who_has_chosen_how_memory_is_kept_has_it_so() -> None:
    """malloc reads the environment when its process starts. That one does not import torch, which takes seconds."""
    constants = [f"{name} = {getattr(environment, name)!r}" for name in ("_KEEPING", "_MALLOC_CHOICES")]
    functions = [inspect.getsource(one) for one in (keep_freed_memory, Info, of_memory)]
    parts = ["import ctypes, os", *constants, *functions, f"print(*of_memory(lambda: bytearray({SIZE})))"]
    command = [sys.executable, "-c", "\n".join(["from __future__ import annotations", *parts])]
    chosen = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(command, env=chosen, capture_output=True, text=True, check=True)
    mapped, kept = map(int, done.stdout.split())
    assert mapped >= SIZE
    assert kept < 0.1 * SIZE


def over_tls() -> None:
    """In a worker's process: a transport that gloo has been built without."""
    os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"


@pytest.mark.procs
def test_a_transport_that_gloo_lacks_is_refused_by_name_before_a_generation_forms(tmp_path: Path) -> None:
    job, listener = make_job(f"{tmp_path}/run"), Collector()
    prepare = {WorkerId(worker): over_tls for worker in range(2)}
    with pytest.raises(RayshardedError, match="GLOO_DEVICE_TRANSPORT=TCP_TLS: the gloo of torch ") as error:
        make_driver(job, make_limits(job, 2), listener, prepare=prepare).run()
    assert "nothing between workers is encrypted" in str(error.value)
    assert "generation" not in [kind for kind, _ in listener.entries]

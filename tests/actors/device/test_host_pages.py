"""Host memory for a GPU: its node from the kernel's files, the kernel's own answer about the policy, large pages."""

from __future__ import annotations

import ctypes
import gc
import platform
from pathlib import Path

import pytest
import torch

from raysharded.actors.device import cuda
from raysharded.actors.device.cuda import Cuda, _locked_pages
from raysharded.actors.device.host_pages import large_pages, node_of, pci_name, prefer
from raysharded.actors.shards.pinned_arena import PinnedArena
from tests.forked import in_a_fork

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}


@pytest.mark.parametrize(
    ("numa_node", "nodes", "found"), [("1", 2, 1), ("0", 2, 0), ("0", 1, None), ("-1", 2, None), ("", 2, None)]
)
def test_a_gpus_node_is_known_where_there_are_several(
    tmp_path: Path, numa_node: str, nodes: int, found: int | None
) -> None:
    pci = pci_name(0, 0x17, 0)
    assert pci == "0000:17:00.0"
    (tmp_path / pci).mkdir()
    (tmp_path / pci / "numa_node").write_text(f"{numa_node}\n")
    for number in range(nodes):
        (tmp_path / "nodes" / f"node{number}").mkdir(parents=True)
    assert node_of(pci, tmp_path, tmp_path / "nodes") == found
    assert node_of("0000:18:00.0", tmp_path, tmp_path / "nodes") is None


def _preferred(node: int) -> tuple[bool, int, int]:
    """In a process: whether the policy was set, and (policy, first word of the nodes) as the kernel has it."""
    return _policy(prefer(node))


def _policy(done: bool) -> tuple[bool, int, int]:
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    ctypes.CDLL(None).syscall(_GET_MEMPOLICY[platform.machine()], ctypes.byref(mode), mask, ctypes.c_ulong(1024), 0, 0)
    return done, mode.value, mask[0]


@pytest.mark.procs
def test_the_kernel_prefers_the_node_for_new_pages() -> None:
    done, mode, mask = in_a_fork(_preferred, 0)
    if not done:
        pytest.skip("this container forbids set_mempolicy")
    assert (mode, mask) == (1, 1)


def _preferred_in_a_thread(node: int) -> tuple[bool, int, int]:
    """In a process: as `_preferred`, in the thread that allocates a worker's page-locked memory."""
    found: list[tuple[bool, int, int]] = []
    done = prefer(node)

    def allocate(size_bytes: int) -> torch.Tensor:
        found.append(_policy(done))
        return torch.empty(size_bytes, dtype=torch.uint8)

    arena = PinnedArena(allocate)
    arena.begin(4096)
    arena.take(4096)
    return found[0]


@pytest.mark.procs
def test_the_thread_that_allocates_prefers_the_node_too() -> None:
    done, mode, mask = in_a_fork(_preferred_in_a_thread, 0)
    if not done:
        pytest.skip("this container forbids set_mempolicy")
    assert (mode, mask) == (1, 1)


def _large_bytes_at(address: int) -> int:
    """Bytes in large pages of the mapping with this address."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name:
            start, end = (int(part, 16) for part in name.split("-"))
            is_here = start <= address < end
        elif is_here and name == "AnonHugePages:":
            return int(rest.split()[0]) << 10
    return 0


def test_memory_is_in_large_pages_and_its_end_is_known_before_it_is_given_back() -> None:
    size, ended = 8 << 20, list[tuple[int, bool]]()

    def note(address: int) -> None:
        mapped = any(
            int(line.split("-")[0], 16) <= address for line in Path("/proc/self/maps").read_text().splitlines()
        )
        ended.append((address, mapped))

    memory = large_pages(size, note)
    assert memory.shape == (size,)
    assert not memory.any()
    if "[never]" not in THP.read_text():
        assert _large_bytes_at(memory.data_ptr()) >= size - (4 << 20), "but for the ends"
    address, part = memory.data_ptr(), memory[4096:8192]
    del memory
    gc.collect()
    part.fill_(3)
    assert not ended, "a part keeps it"
    del part
    gc.collect()
    assert ended == [(address, True)]


class Runtime:
    """The double of CUDA's runtime: locks memory, or refuses to."""

    def __init__(self, code: int) -> None:
        self.code, self.calls = code, list[tuple[str, int]]()

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert flags == 1
        self.calls.append(("lock", address))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        self.calls.append(("unlock", address))
        return 0


def test_large_memory_is_locked_once_and_unlocked_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(cuda, "_LARGE", 1 << 20)
    memory = Cuda().pinned(1 << 20)
    address = memory.data_ptr()
    assert runtime.calls == [("lock", address)]
    del memory
    gc.collect()
    assert runtime.calls == [("lock", address), ("unlock", address)]


def test_memory_that_cuda_does_not_lock_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(cuda, "_LARGE", 1 << 20)

    def launch(*_: object, **__: object) -> None:
        runtime.calls.append(("launch", 0))
        raise RuntimeError("CUDA error: the one that was kept")

    monkeypatch.setattr(torch, "zeros", launch)
    assert _locked_pages(1 << 20) is None
    gc.collect()
    assert [call for call, _ in runtime.calls] == ["lock", "launch"]
    assert "did not lock 1 MiB of host memory (error 1)" in caplog.text


def test_a_node_that_no_machine_has_is_refused() -> None:
    assert not prefer(-1)
    assert not prefer(1 << 20)

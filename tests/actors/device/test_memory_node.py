"""Memory next to a GPU: its node from the kernel's files, and the kernel's own answer about the policy."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest

from raysharded.actors.device.memory_node import node_of, pci_name, prefer
from tests.forked import in_a_fork

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
    done = prefer(node)
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    ctypes.CDLL(None).syscall(_GET_MEMPOLICY[platform.machine()], ctypes.byref(mode), mask, ctypes.c_ulong(1024), 0, 0)
    return done, mode.value, mask[0]


@pytest.mark.procs
def test_the_kernel_prefers_the_node_for_new_pages() -> None:
    done, mode, mask = in_a_fork(_preferred, 0)
    if not done:
        pytest.skip("this container forbids set_mempolicy")
    assert (mode, mask) == (1, 1)


def test_a_node_that_no_machine_has_is_refused() -> None:
    assert not prefer(-1)
    assert not prefer(1 << 20)

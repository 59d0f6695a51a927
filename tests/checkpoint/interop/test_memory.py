"""Exchanges stream: their memory does not grow with the checkpoint."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.testing.storages import save_rows
from tests.forked import in_a_fork

SIZE_BYTES = 256 << 20
LIMIT_BYTES = 200 << 20


def _anonymous_bytes() -> int:
    """Anonymous memory of this process, as the kernel counts it: all that it allocated, without files."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def _growth_of(act: Callable[[], Any]) -> int:
    """The most bytes by which the process grew while `act` ran."""
    before = most = _anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, _anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        act()
    finally:
        done.set()
        watcher.join()
    return most - before


def measure(folder: str, prefix: str) -> dict[str, int]:
    """The growth of each kind of exchange, in bytes. Run in a separate process."""
    from raysharded.checkpoint.interop.copy import copy_checkpoint
    from raysharded.checkpoint.interop.dcp.exporter import export_dcp
    from raysharded.checkpoint.interop.dcp.importer import import_dcp
    from raysharded.checkpoint.interop.diff import diff
    from raysharded.checkpoint.interop.huggingface.exporter import export_huggingface
    from raysharded.checkpoint.interop.huggingface.importer import import_huggingface
    from raysharded.checkpoint.interop.locations import place_of
    from raysharded.checkpoint.reader import open_checkpoint

    def at(name: str) -> Any:
        return place_of(f"{folder}/{name}")

    source = open_checkpoint(*at(prefix))
    acts: dict[str, Callable[[], Any]] = {
        "export dcp": lambda: export_dcp(source, at("dcp")),
        "import dcp": lambda: import_dcp(at("dcp"), at("from-dcp")),
        "export safetensors": lambda: export_huggingface(source, at("hf"), dtype="bfloat16"),
        "import safetensors": lambda: import_huggingface(at("hf"), at("from-hf")),
        "copy": lambda: copy_checkpoint(source, at("copy")),
        "diff": lambda: diff(source, open_checkpoint(*at("from-dcp"))),
    }
    return {name: _growth_of(act) for name, act in acts.items()}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory as Linux tells it")
def test_no_exchange_holds_more_than_a_bounded_part_of_the_checkpoint(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "model.big": np.ones((1000, SIZE_BYTES // 32000), np.float32),
        "model.more": np.ones(SIZE_BYTES // 8),
    }
    prefix = save_rows(LocalStorage(str(tmp_path)), arrays, step=1, save_id="a", num_writers=2)
    growth = in_a_fork(measure, str(tmp_path), prefix, timeout_s=240)  # where nothing freed earlier is used again
    assert len(growth) == 6
    assert max(growth.values()) < LIMIT_BYTES < SIZE_BYTES, growth
    shutil.rmtree(tmp_path)  # more than a gigabyte, which may be in memory

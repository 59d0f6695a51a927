"""Runs from a notebook: the example, executed; and a kernel that is killed while its run continues."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import ray
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from raysharded.report import load
from tests.paths import ROOT
from tests.ray.driving import STEPS, hurry, undisturbed
from tests.ray.leftovers import assert_no_slot_is_leaked, wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.clusters,
    pytest.mark.usefixtures("cluster"),
]

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


@pytest.fixture
def environment(cluster: None, tmp_path: Path) -> dict[str, str]:
    """Environment of a kernel that finds the tests' cluster, which was started before and outlives it."""
    address = str(ray.get_runtime_context().gcs_address)
    paths = {"TMPDIR": str(tmp_path), "RAY_TMPDIR": "/tmp", "IPYTHONDIR": str(tmp_path / "ipython")}
    return {**os.environ, **paths, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}


class Kernel:
    """A Jupyter kernel in a separate process."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self._client = client
        self.pid = int(self.run("import os; print(os.getpid())"))

    def run(self, code: str, timeout_s: float = 120.0) -> str:
        """The output of this code. Raises AssertionError with the kernel's own traceback if it raises."""
        printed: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                printed.append(content["text"])
            elif message["msg_type"] == "error":
                printed.extend(content["traceback"])

        reply = self._client.execute_interactive(code, timeout=timeout_s, output_hook=hear)
        assert reply["content"]["status"] == "ok", "\n".join(printed)
        return "".join(printed).strip()


@contextmanager
def kernel(folder: Path, environment: dict[str, str]) -> Iterator[Kernel]:
    """A kernel that works in the folder; it is ended at the end."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=environment, cwd=str(folder))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield Kernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_the_example_starts_watches_kills_resizes_and_reports(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (folder,) = tmp_path.glob("notebook-*/notebook")
    report = load(str(folder))
    assert report.ok
    assert len(report.summary.recoveries) == 1
    assert len(report.summary.generations[-1].members) == 2
    assert len(report.summary.steps) == report.summary.max_steps
    shown = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert shown, "the handle shows itself"
    assert_no_slot_is_leaked()


@pytest.mark.long
def test_a_run_continues_when_its_kernel_is_killed_and_a_new_kernel_attaches_to_it(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with kernel(tmp_path, environment) as first:
        first.run("from pathlib import Path; from tests.ray.driving import trainer")
        first.run(f"run = trainer(Path({str(tmp_path)!r}), 1).start()")
        wait_until(lambda: int(first.run("print(run.status().step)")) >= 3, "step 3")
        workers = first.run("print(sorted(run.status().pids.values()))")
        os.kill(first.pid, signal.SIGKILL)
    with kernel(tmp_path, environment) as second:
        second.run("import raysharded as rs; run = rs.attach('driven')")
        status = second.run("print(run.status().phase, run.status().step, sorted(run.status().pids.values()))")
        phase, step, pids = status.split(" ", 2)
        assert phase == "training"
        assert 3 <= int(step) < STEPS
        assert pids == workers
        hurry(tmp_path)
        assert second.run("print(run.wait(240).fingerprint)") == undisturbed().fingerprint
    report = load(str(tmp_path / "driven"))
    assert report.ok
    assert report.summary.starts == 1  # the driver never ended
    assert [(record.step, record.loss) for record in report.summary.steps] == list(
        enumerate(undisturbed().losses, start=1)
    )
    assert_no_slot_is_leaked()

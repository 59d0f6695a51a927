"""`raysharded kill`: kill one worker of a run, to see the run recover."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysharded.cli.errors import AsJson, print_json
from raysharded.cli.output import echo
from raysharded.cli.runs.status import RunStorage, url_of
from raysharded.errors import ConfigError

if TYPE_CHECKING:
    from raysharded.checkpoint import Storage


def kill(
    run: RunStorage,
    worker: Annotated[
        int, typer.Option("--worker", metavar="N", min=0, help="The worker's number, as `raysharded status` shows.")
    ],
    as_json: AsJson = False,
) -> None:
    """Send SIGKILL to one worker of a run, on this machine. The run recovers without it.

    The process id comes from the run's journal; the command first checks that the process is a worker.
    """
    from raysharded.report.loader import open_run

    storage = open_run(url_of(run))
    pid = _process_of(storage, worker)
    os.kill(pid, signal.SIGKILL)
    if as_json:
        print_json({"worker": worker, "pid": pid, "url": storage.url})
    else:
        echo(f"worker {worker}, process {pid}: killed")


def _process_of(storage: Storage, worker: int) -> int:
    """The process id of a worker of this machine. Raises ConfigError if it is elsewhere, or has exited."""
    import platform

    from raysharded.checkpoint import signing_key_from_environment
    from raysharded.journal.verified import read_verified
    from raysharded.run.live_processes import is_worker

    entries = read_verified(storage, signing_key_from_environment()).entries
    ready = {int(entry["worker"]): entry for entry in entries if entry["kind"] == "worker_ready"}
    found: dict[str, Any] | None = ready.get(worker)
    if found is None:
        known = ", ".join(map(str, sorted(ready))) or "none"
        raise ConfigError(f"no worker {worker} of the run at {storage.url} has been ready; these have: {known}.")
    pid, node = int(found["pid"]), str(found["node"])
    if node != platform.node():
        raise ConfigError(f"worker {worker} is on {node}, and this is {platform.node()}: run the command there.")
    if pid <= 1 or not is_worker(pid):
        raise ConfigError(f"worker {worker}, process {pid}, has exited. `raysharded status` shows the members.")
    return pid

"""Detection of workers on nodes that the cluster drains, and of a cluster that does not answer.

Knows no Ray: its queries are arguments.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue

from raysharded.ids import WorkerId
from raysharded.protocol.worker_launcher import LeaveNotice

_log = logging.getLogger("raysharded.driver")
_EVERY_S = 1.0
_NO_DEADLINE_S = 300.0
"""Time that a node has if it is drained without a deadline."""


class DrainWatch:
    """Queries every second, in a daemon thread, and keeps the answers until they are fetched."""

    def __init__(
        self,
        draining: Callable[[], Mapping[str, float]],
        node_of: Callable[[WorkerId], str],
        workers: Callable[[], list[WorkerId]],
    ) -> None:
        """`draining`: node id -> time at which the node goes, in seconds since 1970. `node_of`: empty if not known yet.

        Both may raise; if `draining` does, the cluster did not answer. `workers`: all current workers.
        """
        self._draining, self._node_of, self._workers = draining, node_of, workers
        self._found: SimpleQueue[LeaveNotice] = SimpleQueue()
        self._told: dict[WorkerId, tuple[str, float]] = {}
        """Worker -> (node, deadline), as reported last."""
        self._silent_since: float | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="draining").start()

    def fetch(self) -> list[LeaveNotice]:
        """Notices since the last call; never waits."""
        found: list[LeaveNotice] = []
        while True:
            try:
                found.append(self._found.get_nowait())
            except Empty:
                return found

    def silent_s(self) -> float:
        """Seconds since which the cluster has not answered; 0 if it answered the newest query. Any thread."""
        since = self._silent_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Stop the queries."""
        self._ended.set()

    def _run(self) -> None:
        failing = False
        while not self._ended.wait(_EVERY_S):
            asked_at = time.monotonic()
            try:
                draining = self._draining()
                self._silent_since = None
            except Exception as error:  # noqa: BLE001 - thread boundary: the cluster may answer next time
                self._silent_since = self._silent_since or asked_at
                failing = self._tell(error, failing)
                continue
            try:
                self._look(draining)
                failing = False
            except Exception as error:  # noqa: BLE001 - thread boundary: the cluster may answer next time
                failing = self._tell(error, failing)

    def _tell(self, error: Exception, failing: bool) -> bool:
        """Log the first of several errors in a row; returns that there was one."""
        if not failing:
            _log.info("which nodes are drained is not known: %s: %s", type(error).__name__, error)
        return True

    def _look(self, draining: Mapping[str, float]) -> None:
        """Report all workers of a node in one notice."""
        if not draining:
            return
        here: dict[str, list[WorkerId]] = {}
        for worker in self._workers():
            node = self._node_of(worker)  # now: one that has not started may be placed elsewhere than before
            if node in draining and self._told.get(worker) != (node, draining[node]):
                here.setdefault(node, []).append(worker)
        for node, workers in here.items():
            self._told.update(dict.fromkeys(workers, (node, draining[node])))
            left_s = draining[node] - time.time() if draining[node] > 0 else _NO_DEADLINE_S
            reason = f"node {node[:12]} is being drained"
            self._found.put(LeaveNotice(workers=tuple(workers), reason=reason, within_s=max(0.0, left_s)))

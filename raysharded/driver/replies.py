"""Answers of workers and reports of the cluster as events of the state machine; some calls are repeated at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysharded.driver.checkpoints.requests import SaveCallThrottle
from raysharded.driver.state.arithmetic import data_entry
from raysharded.driver.state.events import Event, Ready, WorkerReply
from raysharded.errors import StaleGeneration
from raysharded.ids import WorkerId
from raysharded.protocol.death import DeathExplained
from raysharded.protocol.messages import WorkerInfo, WorkerNotice
from raysharded.protocol.worker_launcher import Happened, Launcher, LeaveNotice, NodeBack, NodeLost, Reply, WorkerLost

_NOTICE_TIMEOUT_S = 60.0
"""Duration of one query for a leave notice; then it is repeated."""


class ReplyTranslator:
    """Translates the replies of one driver's workers. Used by the driver's thread."""

    def __init__(
        self, launcher: Launcher, collecting: SaveCallThrottle, record: Callable[[str, dict[str, Any]], None]
    ) -> None:
        """`record` receives what the first worker reports about the data, for the journal."""
        self._launcher, self._collecting, self._record = launcher, collecting, record
        self._notices: dict[WorkerId, int] = {}
        """Worker -> number of its leave notices so far, as far as known."""
        self._knows_data = False

    def welcome(self, worker: WorkerId) -> None:
        """Register a worker that was ready before; the journal already describes its data."""
        self._knows_data = True
        self._ask_for_notices(worker)

    def forget(self, worker: WorkerId) -> None:
        """Discard what is known of a lost worker."""
        self._notices.pop(worker, None)
        self._collecting.forget(worker)

    def event_of(self, happened: Happened) -> Event | None:
        """The event for a reply, or None if it has no meaning for the machine."""
        match happened:
            case WorkerLost(worker=worker):
                self.forget(worker)
                return happened
            case DeathExplained() | LeaveNotice() | NodeLost() | NodeBack():
                return happened
            case Reply():
                return self._replied(happened)

    def _replied(self, reply: Reply) -> Event | None:
        worker, error = reply.worker, reply.error
        if reply.method == "collect_save":
            self._collecting.answered(worker)
        if isinstance(error, StaleGeneration):
            return None
        if error is not None:
            self.forget(worker)
            self._launcher.kill(worker)
            reason = f"{reply.method} failed: {type(error).__name__}: {error}"
            return WorkerLost(worker=worker, reason=reason, error=error, node_id=reply.node_id)
        if reply.method == "notice":
            return self._noticed(worker, reply.value)
        if isinstance(reply.value, WorkerInfo):
            return self._ready(worker, reply.value)
        return None if reply.value is None else WorkerReply(worker=worker, message=reply.value)

    def _ready(self, worker: WorkerId, facts: WorkerInfo) -> Ready:
        if not self._knows_data:
            self._knows_data = True
            self._record("data", data_entry(facts))
        self._ask_for_notices(worker)
        return Ready(worker=worker, facts=facts)

    def _noticed(self, worker: WorkerId, notice: WorkerNotice | None) -> LeaveNotice | None:
        if notice is not None:
            self._notices[worker] = notice.number
        self._ask_for_notices(worker)
        if notice is None:
            return None
        return LeaveNotice(
            workers=(worker,), reason=notice.reason, within_s=notice.left_s, whole_node=notice.whole_node
        )

    def _ask_for_notices(self, worker: WorkerId) -> None:
        """Have the worker answer at once when it gets a new leave notice."""
        known = self._notices.setdefault(worker, 0)
        self._launcher.call(worker, "notice", known, _NOTICE_TIMEOUT_S)

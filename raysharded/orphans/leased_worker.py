"""A worker that can outlive its driver: it obeys the newest driver alone, and ends by itself when none comes.

Without a call for the lease's time it has the generation stop after the step that it is in, keeps what it holds and
waits for another driver; after `orphan_wait_s` more the workers write a last checkpoint together, and end. Time in
which the worker itself stood still does not count.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import replace
from typing import Any

from raysharded.actors.worker import Worker
from raysharded.checkpoint import open_storage
from raysharded.errors import StaleGeneration
from raysharded.ids import GenerationId, WorkerId
from raysharded.orphans.orphan_checkpoint import Peers, wait_for_turn, write_orphan_checkpoint
from raysharded.protocol.messages import Job, Saved, WorkerInfo
from raysharded.protocol.session import AdoptedWorker, DriverSession, FreedWorker, LeaseState, PartOf
from raysharded.protocol.version import greeting

_log = logging.getLogger("raysharded.worker")
_LOOKS_PER_LEASE = 10
_LOOK_UP_S = 1.0
_END_WITHIN_S = 180.0
"""How long the last checkpoint may take, once nobody else holds the run."""


class LeasedWorker:
    """A `Worker` behind a check of who calls. Any thread; constructed in the main thread of its process."""

    def __init__(
        self,
        worker: WorkerId,
        job: Job,
        terms: DriverSession,
        identity: str,
        peers: Peers | None = None,
    ) -> None:
        """`identity`: the job's; `peers`: how to reach the run's other workers; None: it does not outlive its driver,
        and has no lease."""
        self._id, self._run_url, self._identity, self._peers = worker, job.run_url, identity, peers
        self._worker = Worker(worker, job)
        self._facts: WorkerInfo | None = None
        self._started_by = terms.epoch
        self._changing = threading.Lock()
        """Guards who is obeyed: a call is let in whole before another driver takes over, or not at all."""
        self._lease = LeaseState(terms=terms, heard_at=time.monotonic())
        if peers is not None:
            threading.Thread(target=self._watch, daemon=True, name="lease").start()

    def __repr__(self) -> str:
        """Ray prints it before each line that the task prints."""
        return f"worker {self._id}"

    # -- for anybody, of any version --

    def hello(self) -> dict[str, Any]:
        """The protocol and version, whether it has no driver, and how many seconds it still waits for one: plain data.
        Changes nothing, and is no sign of a driver."""
        with self._changing:
            now = time.monotonic()
            terms, heard_at = self._lease.terms, self._lease.heard_at
            orphan = self._lease.has_nobody(now)
        wait_s = max(0.0, heard_at + terms.lease_s + terms.orphan_wait_s - now)
        return {**greeting(), "orphan": orphan, "wait_s": wait_s}

    # -- for drivers --

    def call(self, epoch: int, method: str, *args: Any) -> Any:
        """Carry out a method of `Worker` for the driver of this epoch. Raises StaleGeneration for an older one."""
        self.renew(epoch)
        value = getattr(self._worker, method)(*args)
        if isinstance(value, WorkerInfo):
            self._facts = value
        return value

    def renew(self, epoch: int) -> None:
        """The driver of this epoch is there. Raises StaleGeneration for an older one."""
        with self._changing:
            self._require(epoch)
            self._lease.heard_at = time.monotonic()

    def leave(self, epoch: int) -> None:
        """End the process; does not return. Raises StaleGeneration for an older driver."""
        with self._changing:
            if epoch < self._lease.terms.epoch:
                raise StaleGeneration(self._lease.refusal(epoch))
            os._exit(0)

    def adopt(self, terms: DriverSession) -> AdoptedWorker:
        """Obey another driver from now on. What the one before had begun is interrupted; what is held then, is said.

        Raises StaleGeneration if a newer driver is obeyed already, or the last checkpoint is written by who took the
        run after this one; or there is nothing to take over: this worker has not started.
        """
        with self._changing:
            self._require(terms.epoch)
            if self._facts is None:
                raise StaleGeneration("this worker has not started yet")
            self._lease.follow(terms, time.monotonic())
        words = self._free(terms.recorded_step)
        self.renew(terms.epoch)
        return AdoptedWorker(
            worker=self._id,
            facts=self._facts,
            stopped=words.stopped,
            reports=words.reports,
            fence=words.fence,
            decisions=words.decisions,
            job=self._identity,
            epoch=self._started_by,
        )

    def _require(self, epoch: int) -> None:
        refused = self._lease.refusal(epoch)
        if refused:
            raise StaleGeneration(refused)

    def _free(self, after_step: int) -> FreedWorker:
        fence = GenerationId(self._worker.generation + 1)
        stopped = self._worker.report(fence)
        return FreedWorker(
            facts=self._facts,
            stopped=replace(stopped, reports=()),
            reports=self._worker.newest_reports(after_step),
            fence=fence,
            decisions=self._worker.decisions,
        )

    # -- without a driver --

    def _watch(self) -> None:
        """In a thread: notices that nobody calls any more."""
        told: float | None = None
        while True:
            pause_s, before = self._lease.terms.lease_s / _LOOKS_PER_LEASE, time.monotonic()
            time.sleep(pause_s)
            now = time.monotonic()
            with self._changing:
                self._lease.stood_still(now - before - pause_s, now)
                lease = replace(self._lease)
            if lease.is_over(now):
                self._end()
            elif lease.is_orphaned(now):
                self._worker.request_boundary(self._worker.generation)
                if told != lease.heard_at:
                    told = lease.heard_at
                    _log.warning("worker %s: no driver for %.1f s; it stops after this step", self._id, now - told)

    def is_orphan(self) -> bool:
        """Whether it has no driver, whichever it had."""
        with self._changing:
            return self._lease.has_nobody(time.monotonic())

    def last_words(self, epoch: int, after_step: int) -> FreedWorker:
        """Stop, unless a driver follows, and say what is held, with the reports of the steps after this one. For the
        worker that leads the last checkpoint, which took the run with this epoch; refused while there is a driver."""
        with self._changing:
            if not self._lease.end(epoch, time.monotonic()):
                raise StaleGeneration(f"worker {self._id} has a driver")
        return self._free(after_step)

    def write_part(self, epoch: int, part: PartOf, generation: GenerationId, writer: str) -> Saved:
        """Write one buffer as a part of the last checkpoint, after `last_words` of the same epoch."""
        if not self._lease.ending or epoch != self._lease.terms.epoch:
            raise StaleGeneration(f"worker {self._id} has a driver")
        return self._worker.write_part(part, generation, writer)

    def _end(self) -> None:
        """The last checkpoint, led by the worker with the lowest number; then the end, at the latest after a bound.
        Returns if a driver takes this worker over."""
        terms, peers, heard_at = self._lease.terms, self._peers, self._lease.heard_at
        assert peers is not None
        _log.warning("worker %s ends: no driver came within %g s", self._id, terms.orphan_wait_s)
        within_s = _END_WITHIN_S + 2 * terms.lease_s
        threading.Thread(target=self._exit_after, args=(within_s, heard_at), daemon=True).start()
        try:
            while self._is_over():
                wait_for_turn(self._id, peers)
                if self._is_over() and write_orphan_checkpoint(self._id, terms, open_storage(self._run_url), peers):
                    break
                time.sleep(_LOOK_UP_S)  # a driver may be about to take it over
        except Exception:  # noqa: BLE001 - the boundary of the thread: nothing may keep the process
            _log.warning("worker %s: the last checkpoint was not written", self._id, exc_info=True)
        self._exit_if_over(0)

    def _is_over(self) -> bool:
        with self._changing:
            return self._lease.is_over(time.monotonic())

    def _exit_after(self, seconds: float, heard_at: float) -> None:
        time.sleep(seconds)
        if self._lease.heard_at == heard_at:  # or else another driver came meanwhile
            self._exit_if_over(1)

    def _exit_if_over(self, code: int) -> None:
        with self._changing:
            if self._lease.is_over(time.monotonic()):
                os._exit(code)


class Tenant(LeasedWorker):
    """The same under the name that its process has: Ray calls it `ray::Tenant`, and people's scripts look for it."""

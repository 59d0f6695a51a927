"""A worker that can outlive its driver: it obeys only the newest driver, and exits if none comes.

Without a call for the lease's time it has the generation stop after the current step, keeps what it holds and waits for
another driver. After `orphan_wait_s` more, the workers write an orphan checkpoint together and exit. If the cluster's
head node is lost too, they do so at once: no driver can find them, and Ray ends them soon. Time in which the worker
itself stood still does not count.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from raysharded.actors.telemetry import position_record
from raysharded.actors.worker import Worker
from raysharded.errors import StaleGeneration, StorageError
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.log import DamagedJournal
from raysharded.orphans.mailbox import Mailbox, MailboxPeers
from raysharded.orphans.orphan_checkpoint import Peers, wait_for_turn, write_orphan_checkpoint
from raysharded.ownership.run_folder import run_storage
from raysharded.protocol.job import Job
from raysharded.protocol.messages import Saved, WorkerInfo
from raysharded.protocol.session import AdoptedWorker, DriverSession, FreedWorker, LeaseState, PartOf
from raysharded.protocol.version import greeting

_log = logging.getLogger("raysharded.worker")
_LOOKS_PER_LEASE = 10
_LOOK_UP_S = 1.0
_END_WITHIN_S = 180.0
"""Longest time that the orphan checkpoint may take, once no other driver holds the run."""
_CLUSTER_ANSWERS_S = 3.0
"""Longest wait for the answer to a query."""


class ClusterPeers(Peers, Protocol):
    """The run's live workers, as the cluster finds them."""

    def own_host(self) -> str:
        """This machine's address for the others."""
        ...

    def cluster_answers(self, within_s: float) -> bool:
        """Whether the cluster's head node answers."""
        ...


class LeasedWorker:
    """A `Worker` that checks the caller. Any thread; constructed in the main thread of its process."""

    def __init__(
        self,
        worker: WorkerId,
        job: Job,
        terms: DriverSession,
        identity: str,
        peers: ClusterPeers | None = None,
    ) -> None:
        """`identity`: the job's; `peers`: access to the run's other workers.

        Without `peers` the worker does not outlive its driver, and has no lease.
        """
        position_record.begin()
        self._id, self._identity, self._peers = worker, identity, peers
        self._storage = run_storage(job.run_url, terms.identity)
        self._worker = Worker(worker, job, self._storage)
        self._facts: WorkerInfo | None = None
        self._exit_at = 0.0
        """The time at which a worker that ends exits in any case."""
        self._started_by = terms.epoch
        self._changing = threading.Lock()
        """Guards the choice of the driver: a call is admitted before another driver takes over, or not at all."""
        self._lease = LeaseState(terms=terms, heard_at=time.monotonic())
        self._mail = MailboxPeers(self._secret)
        self._mailbox = Mailbox(peers.own_host(), self._secret, self) if peers is not None else None
        if peers is not None:
            threading.Thread(target=self._watch, daemon=True, name="lease").start()

    def __repr__(self) -> str:
        """Ray prints it before each line that the task prints."""
        return f"worker {self._id}"

    # -- for callers of any version --

    def hello(self) -> dict[str, Any]:
        """Protocol, version, whether the worker has no driver, and the seconds that it still waits for one.

        Plain data. Changes nothing, and does not renew the lease.
        """
        with self._changing:
            now = time.monotonic()
            terms, heard_at = self._lease.terms, self._lease.heard_at
            orphan = self._lease.has_nobody(now)
        wait_s = max(0.0, heard_at + terms.lease_s + terms.orphan_wait_s - now)
        return {**greeting(), "orphan": orphan, "wait_s": wait_s}

    # -- for drivers --

    def call(self, epoch: int, method: str, *args: Any) -> Any:
        """Call a method of `Worker` for the driver of this epoch. Raises StaleGeneration for an older one."""
        self.renew(epoch)
        value = getattr(self._worker, method)(*args)
        if isinstance(value, WorkerInfo):
            value = replace(value, mailbox=self._mailbox.address if self._mailbox is not None else "")
            self._facts = value
        return value

    def meet(self, epoch: int, addresses: Mapping[WorkerId, str]) -> None:
        """Learn the run's workers by their mailboxes, as the driver of this epoch knows them; renews the lease.

        Raises StaleGeneration for an older driver.
        """
        self.renew(epoch)
        self._mail.meet(addresses)

    def _secret(self) -> bytes:
        return self._lease.terms.secret

    def renew(self, epoch: int) -> None:
        """Renew the lease of the driver of this epoch. Raises StaleGeneration for an older one."""
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
        """Obey another driver from now on: interrupt the previous driver's work, and report what is held.

        Raises StaleGeneration if a newer driver is obeyed already, or if the leader of the orphan checkpoint took the
        run after this driver. Also if there is nothing to take over, because this worker has not started.
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
        """Detect, in a thread, that no driver calls any more."""
        told = False
        while True:
            pause_s, before = self._lease.terms.lease_s / _LOOKS_PER_LEASE, time.monotonic()
            time.sleep(pause_s)
            now = time.monotonic()
            with self._changing:
                self._lease.stood_still(now - before - pause_s, now)
            self._look_for_the_cluster()
            now = time.monotonic()
            with self._changing:
                lease = replace(self._lease)
            if lease.is_over(now):
                self._end()
            elif lease.is_orphaned(now):
                self._worker.request_boundary(self._worker.generation)
                if not told:
                    silent_s = now - lease.heard_at
                    _log.warning("worker %s: no driver for %.1f s; it stops after this step", self._id, silent_s)
                told = True
            else:
                told = False

    def _look_for_the_cluster(self) -> None:
        """Find out whether the head node is lost too, once the driver is silent; not before."""
        lease, peers = self._lease, self._peers
        assert peers is not None
        began, was_lost = time.monotonic(), lease.cluster_lost
        answers = not lease.is_quiet(began) or peers.cluster_answers(_CLUSTER_ANSWERS_S)
        lease.note_cluster(began, time.monotonic(), answers=answers)
        if lease.cluster_lost and not was_lost:
            _log.warning(
                "worker %s: neither its driver nor the Ray cluster's head node answers. When the lease of %g s "
                "has ended, it writes a last checkpoint with the workers that it reaches, before Ray ends them",
                self._id,
                lease.terms.lease_s,
            )

    def is_orphan(self) -> bool:
        """Whether the worker has no driver."""
        with self._changing:
            return self._lease.has_nobody(time.monotonic())

    def last_words(self, epoch: int, after_step: int) -> FreedWorker:
        """Stop unless a driver follows, and report what is held, with the reports of later steps than `after_step`.

        Called by the leader of the orphan checkpoint, which took the run with this epoch. Rejected while there is a
        driver.
        """
        with self._changing:
            if not self._lease.end(epoch, time.monotonic()):
                raise StaleGeneration(f"worker {self._id} has a driver")
        return self._free(after_step)

    def write_part(self, epoch: int, part: PartOf, generation: GenerationId, writer: str) -> Saved:
        """Write one buffer as a part of the orphan checkpoint, after `last_words` of the same epoch."""
        if not self._lease.ending or epoch != self._lease.terms.epoch:
            raise StaleGeneration(f"worker {self._id} has a driver")
        return self._worker.write_part(part, generation, writer)

    def _end(self) -> None:
        """Write the orphan checkpoint, led by the lowest-numbered worker; then exit, at the latest after a time limit.

        Returns if a driver takes this worker over. While storage takes no writes, all keep what they hold.
        """
        terms, heard_at, lost = self._lease.terms, self._lease.heard_at, self._lease.cluster_lost
        peers: Peers | None = self._mail if lost else self._peers
        assert peers is not None
        why = "the head node is lost" if lost else f"no driver came within {terms.orphan_wait_s:g} s"
        _log.warning("worker %s ends: %s", self._id, why)
        retry_until = time.monotonic() + terms.storage_patience_s
        self.keep(_END_WITHIN_S + 2 * terms.lease_s)
        threading.Thread(target=self._exit_when_due, args=(heard_at,), daemon=True).start()
        try:
            while self._is_over():
                wait_for_turn(self._id, peers)
                if self._is_over() and self._write_orphan_checkpoint(terms, peers, retry_until):
                    break
                time.sleep(_LOOK_UP_S)  # a driver may be about to take it over, or storage to be back
        except Exception:  # noqa: BLE001 - thread boundary: nothing may keep the process alive
            _log.warning("worker %s: the last checkpoint was not written", self._id, exc_info=True)
        self._exit_if_over(0)

    def _write_orphan_checkpoint(self, terms: DriverSession, peers: Peers, retry_until: float) -> bool:
        """Whether there is nothing left to wait for. Raises StorageError once storage has failed for too long.

        Also for a damaged journal, which no time mends.
        """
        try:
            return write_orphan_checkpoint(
                self._id, terms, self._storage, peers, may_retry=lambda: time.monotonic() < retry_until
            )
        except StorageError as error:
            if time.monotonic() >= retry_until or isinstance(error, DamagedJournal):
                raise
            _log.warning("worker %s: the last checkpoint is retried: %s", self._id, error)
        peers.ask(None, "keep", _END_WITHIN_S + 2 * terms.lease_s, timeout_s=_LOOK_UP_S)
        return False

    def keep(self, seconds: float) -> None:
        """Exit no earlier than in this time, unless the orphan checkpoint is written."""
        self._exit_at = max(self._exit_at, time.monotonic() + seconds)

    def _is_over(self) -> bool:
        with self._changing:
            return self._lease.is_over(time.monotonic())

    def _exit_when_due(self, heard_at: float) -> None:
        while (left_s := self._exit_at - time.monotonic()) > 0:
            time.sleep(left_s)
        if self._lease.heard_at == heard_at:  # otherwise another driver came meanwhile
            self._exit_if_over(1)

    def _exit_if_over(self, code: int) -> None:
        with self._changing:
            if self._lease.is_over(time.monotonic()):
                os._exit(code)


class Tenant(LeasedWorker):
    """The class name that Ray shows for its process, `ray::Tenant`: users' scripts rely on it."""

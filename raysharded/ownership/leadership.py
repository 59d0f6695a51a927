"""A driver's leadership over its run: acquired, shown by a heartbeat, checked, released. Acts on `lease`."""

from __future__ import annotations

import contextlib
import logging
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from raysharded.checkpoint import Claims, NoSuchKey, NotOwner, SigningKey, Storage
from raysharded.checkpoint.format.signing import place_of
from raysharded.checkpoint.removal_mark import refuse_removed
from raysharded.checkpoint.stored_claims import Claim, find_newest
from raysharded.clock import Clock
from raysharded.errors import RunFailed, RunOwnedElsewhere, StorageError
from raysharded.ids import GenerationId
from raysharded.ownership.lease import (
    BEATS_PER_LEASE,
    Holder,
    LeaseVerdict,
    Seen,
    encode,
    has_changed,
    judge,
    lease_key,
    read_lease,
)
from raysharded.ownership.process_identity import Stopwatch, is_gone, this_process
from raysharded.protocol.worker_launcher import LeadershipCheck

T = TypeVar("T")

_log = logging.getLogger("raysharded.driver")
REMOVER = "removal_"
"""Beginning of the names of processes that hold a run to remove it, or to copy into it."""
_PATIENCE_S = 60.0
"""Longest time that storage may fail while the run's leader is determined."""
_LOOK_UP_S = 0.5
_CONFIRMED = 2 / 3
"""Fraction of the lease's time after a confirmation in which no other driver can lead, except by force."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseTerms:
    """Terms on which a driver acquires and holds its run."""

    lease_s: float = 15.0
    take_over: bool = False
    """Take the run over from its leader without waiting."""
    given_up: Callable[[], bool] = lambda: False
    """Checked during the wait: whether to stop waiting."""
    ending: bool = False
    """Whether the run is acquired for an orphan checkpoint: others wait for it instead of being refused."""
    removing: bool = False
    """Whether the run is acquired to be removed, or for a copy into it, and may be half removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcquiredLease:
    """The run as it was acquired."""

    first: GenerationId
    """First generation of this driver's leadership: above all generations claimed before."""
    before: str = ""
    """The driver before, in words; empty if there was none."""
    because: str = ""


class Leadership(LeadershipCheck, Protocol):
    """Leadership over a run from acquisition to release: the interface that `RunLeadership` implements."""

    def acquire(self) -> AcquiredLease: ...

    def end(self, timeout_s: float) -> None: ...


class RunLeadership:
    """One driver's leadership over one run.

    `acquire` is called once; afterwards any thread may call the other methods.
    """

    def __init__(
        self,
        run: str,
        storage: Storage,
        claims: Claims,
        clock: Clock,
        terms: LeaseTerms,
        on_lost: Callable[[str], None],
        say: Callable[[dict[str, object]], None],
        *,
        where: tuple[str, str],
        has_ended: Callable[[str, str], bool],
        key: SigningKey | None = None,
    ) -> None:
        """`on_lost` is called once, with the reason, if another driver takes the run. `say` receives reports of a wait.

        `key` signs the lease; a lease that it did not sign shows no more than whether it changes.

        `where`: this driver's cluster and job; `has_ended`: whether another driver's job is over.
        """
        self._run, self._storage, self._claims, self._clock = run, storage, claims, clock
        self._terms, self._on_lost, self._say, self._has_ended = terms, on_lost, say, has_ended
        self._key = key
        self._holder = Holder(
            driver=claims.writer,
            host=platform.node(),
            process=this_process(),
            since=clock.wall(),
            lease_s=terms.lease_s,
            cluster=where[0],
            job=where[1],
            ending=terms.ending,
        )
        self._ended, self._asked = threading.Event(), threading.Event()
        self._news = threading.Condition()
        """Notified when a check has found that this driver leads the run, or no longer does."""
        self._confirmed, self._loop = Stopwatch(), Stopwatch()
        self._rival: Claim | None = None
        self._thread: threading.Thread | None = None

    # -- acquire --

    def acquire(self) -> AcquiredLease:
        """Lead the run from a generation above all claimed ones, and show it from now on.

        Raises RunOwnedElsewhere, with the leader and its start time, if another driver leads it, or if the run is being
        removed. Raises RunFailed if the wait for one that may be dead was cancelled; StorageError after a minute of
        failures.
        """
        try:
            owner, seen, because, first = self._acquired()
            self._refuse_removed()
        except BaseException:
            if self._holder.beat:  # it belongs to no leader
                with contextlib.suppress(StorageError):
                    self._storage.delete([lease_key(self._holder.driver)])
            raise
        self._confirmed.set()
        self._loop.set()
        before = "" if owner is None else str(seen.holder) if seen and seen.holder else f"driver {owner.writer}"
        self._thread = threading.Thread(target=self._show, args=(owner,), daemon=True, name="lease")
        self._thread.start()
        return AcquiredLease(first=GenerationId(first), before=before, because=because)

    def require_free(self) -> None:
        """Return once no other driver leads the run; changes nothing. Raises as `acquire` does."""
        self._wait_for(self._patiently(self._newest_claim))

    def _acquired(self) -> tuple[Claim | None, Seen | None, str, int]:
        """The driver before, its lease, the reason why it may be followed, and the generation of the claim."""
        while True:
            owner = self._patiently(self._newest_claim)
            seen, because = self._wait_for(owner)
            self._refuse_removed()
            self._patiently(self._beat)  # the lease exists before the claim
            instead_of = owner

            def own(instead_of: Claim | None = instead_of) -> int:
                return self._claims.own(1, "anyone" if self._terms.take_over else instead_of)

            try:
                return owner, seen, because, self._patiently(own)
            except NotOwner:  # another driver was faster: does it lead now?
                continue

    def _wait_for(self, owner: Claim | None) -> tuple[Seen | None, str]:
        """Wait until the owner may be followed. Returns its lease, and the reason."""
        if owner is None:
            return None, ""
        first = self._patiently(lambda: self._look(owner))
        if self._terms.take_over:
            return first, "a takeover was requested"
        watch, now, said = Stopwatch(), first, False
        while True:
            holder = now.holder if now else None
            dead = holder is not None and self._is_dead(holder)
            verdict = judge(first, now, watch.seconds(), dead=dead, own_lease_s=self._terms.lease_s)
            if verdict is LeaseVerdict.HELD:
                raise RunOwnedElsewhere(
                    _held_by(self._run, self._storage, owner, holder, removing=self._terms.removing)
                )
            if verdict is not LeaseVerdict.UNKNOWN:
                return now, verdict.value
            if not said:
                said = True
                about = str(holder) if holder else f"driver {owner.writer}"
                lease_s = max(self._terms.lease_s, holder.lease_s if holder else 0.0)
                self._say({"owner": about, "lease_s": lease_s})
            self.pause(min(_LOOK_UP_S, self._terms.lease_s / 10))
            if has_changed(first, now):  # it is ending, and still alive
                first = now
                watch.set()
            now = self._patiently(lambda: self._look(owner))

    def _refuse_removed(self) -> None:
        if not self._terms.removing:
            self._patiently(lambda: refuse_removed(self._storage, RunOwnedElsewhere))

    def _is_dead(self, holder: Holder) -> bool:
        if is_gone(holder.process):
            return True
        known = holder.cluster and (holder.cluster, holder.job) != (self._holder.cluster, self._holder.job)
        return bool(known and holder.cluster == self._holder.cluster and self._has_ended(holder.cluster, holder.job))

    def _newest_claim(self) -> Claim | None:
        return find_newest(self._storage, key=self._key)[1]

    def _look(self, owner: Claim) -> Seen | None:
        key = self._key if owner.seal else None  # a driver that did not sign its claim did not sign its lease
        try:
            return read_lease(self._storage, owner.writer, key=key)
        except NoSuchKey:
            return None

    def _patiently(self, operation: Callable[[], T]) -> T:
        since = Stopwatch()
        while True:
            try:
                return operation()
            except StorageError as error:
                if since.seconds() > _PATIENCE_S:
                    raise
                _log.warning("cannot read who holds run %s; retrying: %s", self._run, error)
                self.pause(1.0)

    def pause(self, seconds: float) -> None:
        """Sleep, before the run is acquired. Raises RunFailed if the wait was cancelled."""
        if self._terms.given_up():
            raise RunFailed(f"Stopped. Run {self._run!r} had not begun: another driver may hold it.")
        self._ended.wait(seconds)

    # -- show --

    def _beat(self) -> None:
        self._holder = replace(self._holder, beat=self._holder.beat + 1)
        at = lease_key(self._holder.driver)
        self._storage.write(at, [encode(self._holder, key=self._key, place=place_of(self._storage.url, at))])

    def _show(self, before: Claim | None) -> None:
        """Renew the lease, in a thread. If it hangs, others see a driver that may be dead."""
        if before is not None and before.writer != self._holder.driver:
            with contextlib.suppress(StorageError):
                self._storage.delete([lease_key(before.writer)])
        while True:
            self._asked.wait(self._terms.lease_s / BEATS_PER_LEASE)
            self._asked.clear()
            if self._ended.is_set():
                break
            with contextlib.suppress(StorageError):  # the next beat retries
                if not self._owns_now():
                    return
                self._beat()
        self._holder = replace(self._holder, ended=True)
        with contextlib.suppress(StorageError):
            if self._owns_now():
                self._beat()

    def _owns_now(self) -> bool:
        """Whether no other driver has claimed the run; the first claim of another is reported to `on_lost`."""
        began = Stopwatch()
        rival = self._rival or self._claims.find_rival()
        with self._news:
            known, self._rival = self._rival, rival
            if rival is None:
                self._confirmed = began
            self._news.notify_all()
        if rival is None:
            return True
        if known is None:
            with contextlib.suppress(StorageError):
                self._storage.delete([lease_key(self._holder.driver)])
            self._on_lost(_taken_over(self._run, self._storage, self._holder, rival))
        return False

    # -- check --

    def check_awake(self) -> None:
        """Check leadership in every round of the driver's loop, before it acts.

        Raises RunOwnedElsewhere if the loop stood still so long that another driver may have taken the run, and one
        has. If storage does not answer within a beat, leadership is assumed: workers wait for their driver, and reject
        an older one.
        """
        stood_still_s = self._loop.seconds()
        self._loop.set()
        if stood_still_s <= self._terms.lease_s / BEATS_PER_LEASE:
            return
        asking = Stopwatch()
        with self._news:  # the lease's thread queries storage, which may be slow
            self._asked.set()
            answered = self._news.wait_for(
                lambda: self._rival is not None or self._confirmed.seconds() <= asking.seconds(),
                self._terms.lease_s / BEATS_PER_LEASE,
            )
        self._loop.set()
        if self._rival is not None:
            raise RunOwnedElsewhere(_taken_over(self._run, self._storage, self._holder, self._rival))
        _log_standstill(self._run, stood_still_s, leads=answered)

    def is_sure(self) -> bool:
        """Whether it is known, without a query, that no other driver can lead the run now."""
        return self._rival is None and self._confirmed.seconds() < _CONFIRMED * self._terms.lease_s

    def may_act(self) -> bool:
        """Whether irreversible actions on workers are allowed: no other driver can lead the run now.

        Queries storage if necessary; False if it does not answer.
        """
        if self.is_sure():
            return True
        try:
            return self._rival is None and self._owns_now()
        except StorageError:
            return False

    # -- release --

    def end(self, timeout_s: float) -> None:
        """Release the run, within this time. If that fails, others detect it themselves."""
        self._ended.set()
        self._asked.set()
        if self._thread is not None:
            self._thread.join(timeout_s)


def _held_by(run: str, storage: Storage, owner: Claim, holder: Holder | None, *, removing: bool) -> str:
    held = f"run {run!r} under {storage.url} is held by {holder or f'driver {owner.writer}'}, which is "
    if removing or owner.writer.startswith(REMOVER):
        return f"{held}alive. Wait for it, or end it; then repeat this."
    return f"{held}alive. Wait for it, end it, or take over with fit(take_over=True): it then ends with an error."


def _taken_over(run: str, storage: Storage, own: Holder, rival: Claim) -> str:
    return (
        f"driver {rival.writer} has taken over run {run!r} under {storage.url}; this one ({own.driver}) ends, and "
        "leaves the workers to it. Start each run name from one place at a time."
    )


def _log_standstill(run: str, seconds: float, *, leads: bool) -> None:
    if leads:
        _log.info("run %s: the driver stood still for %.1f s, and still leads the run", run, seconds)
    else:
        _log.warning(
            "run %s: the driver stood still for %.1f s; storage has not confirmed yet that it leads the run",
            run,
            seconds,
        )

"""A driver's leadership over its run: acquired, shown to others by a heartbeat, checked, released. Acts on `lease`."""

from __future__ import annotations

import contextlib
import logging
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from raysharded.checkpoint import Claims, NoSuchKey, NotOwner, Storage
from raysharded.checkpoint.claims import Claim, find_newest
from raysharded.clock import Clock
from raysharded.errors import RunFailed, RunOwnedElsewhere, StorageError
from raysharded.ids import GenerationId
from raysharded.locations import join_url
from raysharded.ownership.lease import (
    BEATS_PER_LEASE,
    Holder,
    LeaseVerdict,
    Seen,
    decode,
    encode,
    has_changed,
    judge,
    lease_key,
)
from raysharded.ownership.process_identity import Stopwatch, is_gone, this_process
from raysharded.protocol.worker_launcher import LeadershipCheck

T = TypeVar("T")

_log = logging.getLogger("raysharded.driver")
_PATIENCE_S = 60.0
"""How long storage may fail while it is found out whether somebody holds the run."""
_LOOK_UP_S = 0.5
_CONFIRMED = 2 / 3
"""For this part of the lease's time after it was last confirmed nobody else can hold it, unless by force."""
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseTerms:
    """How a driver takes and holds its run."""

    lease_s: float = 15.0
    take_over: bool = False
    """Follow whoever holds the run without waiting."""
    given_up: Callable[[], bool] = lambda: False
    """Asked while it waits: whether it need not wait any longer."""
    ending: bool = False
    """It takes the run for one last checkpoint: others wait for it instead of being refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcquiredLease:
    """The run as it was acquired."""

    first: GenerationId
    """The generation since which the run is this driver's: above all that were claimed before."""
    before: str = ""
    """The driver that was followed, in words; empty if there was none."""
    because: str = ""


class Leadership(LeadershipCheck, Protocol):
    """Leadership over a run from acquiring it to releasing it: the seam that `RunLeadership` fills."""

    def acquire(self) -> AcquiredLease: ...

    def end(self, timeout_s: float) -> None: ...


class RunLeadership:
    """One driver's leadership over one run. `acquire` is called once; the other methods by any thread afterwards."""

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
    ) -> None:
        """`on_lost` is called once, with the reason, if another driver has taken the run; `say` hears of a wait.
        `where`: this driver's cluster and job; `has_ended`: whether another's job is over."""
        self._run, self._storage, self._claims, self._clock = run, storage, claims, clock
        self._terms, self._on_lost, self._say, self._has_ended = terms, on_lost, say, has_ended
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
        """Notified when the run was found to be owned still, or not any more."""
        self._confirmed, self._loop = Stopwatch(), Stopwatch()
        self._rival: Claim | None = None
        self._thread: threading.Thread | None = None

    # -- taken --

    def acquire(self) -> AcquiredLease:
        """Own the run from a generation above all that were claimed, and show so from now on.

        Raises RunOwnedElsewhere, with who and since when, if another driver holds it; RunFailed if the wait for one
        that may be dead was given up; StorageError after a minute of failures.
        """
        try:
            owner, seen, because, first = self._acquired()
        except BaseException:
            if self._holder.beat:  # it is nobody's
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
        """Return once no other driver holds the run, and leave everything as it is. Raises as `acquire` does."""
        self._wait_for(self._patiently(lambda: find_newest(self._storage)[1]))

    def _acquired(self) -> tuple[Claim | None, Seen | None, str, int]:
        """Who was followed, its lease, why it could be, and the generation of the claim."""
        while True:
            owner = self._patiently(lambda: find_newest(self._storage)[1])
            seen, because = self._wait_for(owner)
            self._patiently(self._beat)  # there is a lease before there is an owner
            instead_of = owner

            def own(instead_of: Claim | None = instead_of) -> int:
                return self._claims.own(1, "anyone" if self._terms.take_over else instead_of)

            try:
                return owner, seen, because, self._patiently(own)
            except NotOwner:  # somebody was faster: is it held now?
                continue

    def _wait_for(self, owner: Claim | None) -> tuple[Seen | None, str]:
        """Returns when the owner may be followed: its lease, and why."""
        if owner is None:
            return None, ""
        first = self._patiently(lambda: self._look(owner.writer))
        if self._terms.take_over:
            return first, "it was told to"
        watch, now, said = Stopwatch(), first, False
        while True:
            holder = now.holder if now else None
            dead = holder is not None and self._is_dead(holder)
            verdict = judge(first, now, watch.seconds(), dead=dead, own_lease_s=self._terms.lease_s)
            if verdict is LeaseVerdict.HELD:
                raise RunOwnedElsewhere(self._held_by(owner, holder))
            if verdict is not LeaseVerdict.UNKNOWN:
                return now, verdict.value
            if not said:
                said = True
                about = str(holder) if holder else f"driver {owner.writer}"
                lease_s = max(self._terms.lease_s, holder.lease_s if holder else 0.0)
                self._say({"owner": about, "lease_s": lease_s})
            self.pause(min(_LOOK_UP_S, self._terms.lease_s / 10))
            if has_changed(first, now):  # it is ending, and still there
                first = now
                watch.set()
            now = self._patiently(lambda: self._look(owner.writer))

    def _is_dead(self, holder: Holder) -> bool:
        if is_gone(holder.process):
            return True
        known = holder.cluster and (holder.cluster, holder.job) != (self._holder.cluster, self._holder.job)
        return bool(known and holder.cluster == self._holder.cluster and self._has_ended(holder.cluster, holder.job))

    def _held_by(self, owner: Claim, holder: Holder | None) -> str:
        return (
            f"run {self._run!r} under {self._storage.url} is held by {holder or f'driver {owner.writer}'}, which is "
            "alive. Wait for it, end it, or take the run over with fit(take_over=True): it then ends with an error."
        )

    def _look(self, driver: str) -> Seen | None:
        key = lease_key(driver)
        try:
            return decode(self._storage.read(key, 0, _MAX_BYTES), join_url(self._storage.url, key))
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
                _log.warning("who holds run %s could not be found out; trying again: %s", self._run, error)
                self.pause(1.0)

    def pause(self, seconds: float) -> None:
        """Wait, before the run is acquired. Raises RunFailed if the wait was given up."""
        if self._terms.given_up():
            raise RunFailed(f"Stopped. Run {self._run!r} had not begun: another driver may hold it.")
        self._ended.wait(seconds)

    # -- shown --

    def _beat(self) -> None:
        self._holder = replace(self._holder, beat=self._holder.beat + 1)
        self._storage.write(lease_key(self._holder.driver), [encode(self._holder)])

    def _show(self, before: Claim | None) -> None:
        """In a thread: what hangs here is seen by others as a driver that may be dead."""
        if before is not None and before.writer != self._holder.driver:
            with contextlib.suppress(StorageError):
                self._storage.delete([lease_key(before.writer)])
        while True:
            self._asked.wait(self._terms.lease_s / BEATS_PER_LEASE)
            self._asked.clear()
            if self._ended.is_set():
                break
            with contextlib.suppress(StorageError):  # the next beat tries again
                if not self._owns_now():
                    return
                self._beat()
        self._holder = replace(self._holder, ended=True)
        with contextlib.suppress(StorageError):
            if self._owns_now():
                self._beat()

    def _owns_now(self) -> bool:
        """Whether nobody else has claimed the run; the first time that somebody has, that is told."""
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
            self._on_lost(str(self._lost_to(rival)))
        return False

    def _lost_to(self, rival: Claim) -> RunOwnedElsewhere:
        return RunOwnedElsewhere(
            f"driver {rival.writer} has taken over run {self._run!r} under {self._storage.url}; this one "
            f"({self._holder.driver}) ends, and leaves the workers to it. Start each run name from one place at a time."
        )

    # -- checked --

    def check_awake(self) -> None:
        """To be called in every round of the driver's loop before it acts. Raises RunOwnedElsewhere if the loop stood
        still for so long that another may have taken the run, and one has. Storage that does not tell within a beat
        is taken for nobody: workers wait for their driver, and refuse one that was followed."""
        stood_still_s = self._loop.seconds()
        self._loop.set()
        if stood_still_s <= self._terms.lease_s / BEATS_PER_LEASE:
            return
        _log.warning("run %s: the driver stood still for %.1f s; does it still own the run?", self._run, stood_still_s)
        asking = Stopwatch()
        with self._news:  # the lease's thread asks: storage may take its time
            self._asked.set()
            self._news.wait_for(
                lambda: self._rival is not None or self._confirmed.seconds() <= asking.seconds(),
                self._terms.lease_s / BEATS_PER_LEASE,
            )
        self._loop.set()
        if self._rival is not None:
            raise self._lost_to(self._rival)

    def is_sure(self) -> bool:
        """Whether it is known, without asking anybody, that nobody else can own the run now."""
        return self._rival is None and self._confirmed.seconds() < _CONFIRMED * self._terms.lease_s

    def may_act(self) -> bool:
        """Whether what cannot be taken back may be done to workers: nobody else can own the run now. Asks storage if
        that takes it; False if it does not tell."""
        if self.is_sure():
            return True
        try:
            return self._rival is None and self._owns_now()
        except StorageError:
            return False

    # -- let go --

    def end(self, timeout_s: float) -> None:
        """Say that the run is free, within this time; without it others find out by themselves."""
        self._ended.set()
        self._asked.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

"""A driver's start: it acquires the run, finds the point to resume from, and takes over workers that are left."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from raysharded import numerics
from raysharded.checkpoint import Claims
from raysharded.checkpoint.retention.catalog import list_checkpoints
from raysharded.clock import Clock
from raysharded.driver.checkpoints import save_timer, saves
from raysharded.driver.checkpoints.committer import RunFiles, distrust
from raysharded.driver.membership.state_source import describe_source
from raysharded.driver.startup.adopted_workers import (
    as_decided,
    entry,
    first_source,
    resized,
    saves_given_up,
    taken_over,
    without_differing,
)
from raysharded.driver.startup.resume_point import ResumePoint, find, keyless, resumed, rollbacks, undone, with_missing
from raysharded.driver.startup.unsigned_journal import require_confirmed
from raysharded.driver.state import arithmetic
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, Record
from raysharded.driver.state.state import State
from raysharded.errors import RefusedCheckpoint
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.log import Journal, newest_generation, refusing_damage
from raysharded.journal.verified import JournalReader
from raysharded.ownership.leadership import AcquiredLease, Leadership
from raysharded.ownership.run_folder import identify
from raysharded.protocol.session import DriverSession, FoundWorkers, last_recorded_step, taken_back, unrecorded
from raysharded.protocol.worker_launcher import LeadershipCheck

_LET_GO_S = 1.0
"""Time limit for releasing the run."""


class RunStartup:
    """Starts one driver on its run: `own`, then `resume` if there is something to resume, then `take_over`."""

    def __init__(
        self,
        files: RunFiles,
        leadership: Leadership,
        enter: Callable[[DriverSession, LeadershipCheck], FoundWorkers],
        claims: Claims,
        journal: Journal,
        clock: Clock,
        *,
        lease_s: float,
        orphan_wait_s: float,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """`enter`: the launcher's method; `before` is called before the run is touched."""
        self._files, self._leadership, self._enter = files, leadership, enter
        self._claims, self._journal = claims, journal
        self._clock, self._lease_s, self._orphan_wait_s = clock, lease_s, orphan_wait_s
        self._before = before
        self._acquired: AcquiredLease | None = None
        self._identity = ""
        """The identity of the run's folder; empty for other storages."""
        self._dropped: arithmetic.Differing = {}
        """Rules that the run no longer uses, as a user accepted."""
        self.entries: list[Mapping[str, Any]] = []
        """The run's journal at the time when the run was acquired, as far as it counts, until `give_up_entries`.

        Without what no new driver needs (`journal.verified`).
        """
        self._is_unsigned = False
        """Whether the run has a key, and the key signed no entry."""
        self._unfinished: tuple[int, ...] = ()
        """Steps of checkpoints of which storage has a part."""
        self._lacks_key = False
        """Whether the run's journal is signed, and there is no key."""

    def own(self, state: State, journal: JournalReader | None = None) -> State:
        """Acquire the run: no earlier driver can commit from here on. A second call does nothing.

        `journal`: a reader that has read the run's journal before; it then reads only what was written since.
        """
        if self._acquired is not None:
            return state
        self._before()
        self._acquired = self._leadership.acquire()
        try:
            self._identity = identify(self._files.storage)
            if self._acquired.before:
                self._journal.fence()
            self._read_journal(journal)  # not earlier: the driver before may have written until now
            with refusing_damage(self._files.storage):
                first = max(self._acquired.first, newest_generation(self.entries) + 1)
                state = resized(state, self.entries, self._files.metadata.get("scaling"))
                return replace(state, generation=GenerationId(first - 1), invalidated_up_to=taken_back(self.entries))
        except BaseException:
            self.let_go()
            raise

    def _read_journal(self, journal: JournalReader | None) -> None:
        try:
            found = (journal or self._files.journal()).read()
        except BaseException:
            self.let_go()
            raise
        self.entries, self._is_unsigned, self._lacks_key = [*found.entries], found.is_unsigned, found.lacks_key
        self._journal.follow(found.link)

    def resume(self, state: State) -> tuple[State, ResumePoint]:
        """The state that resumes from the newest checkpoint, if one exists. Releases the run on failure.

        Raises InexactError if this version has dropped a rule that the run uses, unless that is accepted. Raises
        RefusedCheckpoint if the run has a key, and decisions about its next steps are not signed, and if it is signed
        and there is no key.
        """
        files = self._files
        try:
            gone = self._undone()
            if self._lacks_key:
                find(files)  # a signed checkpoint is named first
                raise RefusedCheckpoint(keyless(f"the journal of the run at {files.storage.url}"))
            if self._is_unsigned:
                found = find(files)
                with refusing_damage(files.storage):
                    require_confirmed(self.entries, found, list_checkpoints(files.storage, key=files.key), files)
            distrust(files.storage, gone, files.key)
            found = find(files, without=gone)
            with refusing_damage(files.storage):
                if files.key is not None:
                    found = with_missing(found, self.entries, gone)
                self._unfinished = found.unfinished
                return self._with_rules(resumed(state, self._files, found, self.entries)), found
        except BaseException:
            self.let_go()
            raise

    def _undone(self) -> frozenset[str]:
        """Folders of the checkpoints that a rollback has undone."""
        files = self._files
        with refusing_damage(files.storage):
            refs = list_checkpoints(files.storage, key=files.key) if rollbacks(self.entries) else ()
            return undone(self.entries, refs)

    def _with_rules(self, state: State) -> State:
        """The state with rules that this version has. Raises InexactError as `resume` does."""
        dropped, rules = arithmetic.dropped(state.limits, state.numerics), numerics.kept(state.numerics)
        if dropped and not state.limits.accept_arithmetic:
            raise arithmetic.rules_refusal(state.step, dropped)
        if state.limits.accept_arithmetic:
            rules = numerics.renewed(state.numerics)
            dropped = {**dropped, **arithmetic.raised(state.numerics, rules)}
        self._dropped = {name: (was, str(numerics.number_of(rules, name))) for name, (was, _) in dropped.items()}
        return replace(state, numerics=rules)

    def take_over(self, state: State) -> tuple[State, list[Command], tuple[WorkerId, ...]]:
        """Adopt the workers of the driver before, if there are any.

        Returns the state with them, the journal entries about it, and their ids.
        """
        acquired = self._owned()
        with refusing_damage(self._files.storage):
            terms = self._terms(acquired)
        entered = self._enter(terms, self._leadership)
        with refusing_damage(self._files.storage):
            return self._taken_over(state, acquired, entered)

    def give_up_entries(self) -> list[Mapping[str, Any]]:
        """The entries of earlier drivers, which are not kept any longer: those of a long run take memory."""
        entries, self.entries = self.entries, []
        return entries

    def _taken_over(
        self, state: State, acquired: AcquiredLease, entered: FoundWorkers
    ) -> tuple[State, list[Command], tuple[WorkerId, ...]]:
        rules = arithmetic.rules_on_record(self.entries) if state.checkpoint is None else None
        anew = rules is not None and bool(arithmetic.dropped(state.limits, rules))
        state, entered, refused = without_differing(state, entered, anew=anew)
        state = taken_over(state, entered.adopted)
        accepted: list[Command] = []
        if self._dropped:
            accepted.append(arithmetic.entry(state.step + 1, self._dropped, state.arithmetic or {}, state.numerics))
        given_up = saves_given_up(state, self.entries, self._unfinished, entered.adopted)
        left: list[Command] = [saves.left_by_earlier_driver(step) for step in given_up]
        if given_up and given_up[-1] <= state.step:  # a later step is computed again, with its checkpoint
            state = save_timer.lost(state, state.generation, given_up[-1])
        if not entered.adopted and not entered.ended:
            return state, [*accepted, *left], ()
        if entered.adopted:
            state = as_decided(state, self.entries, self._clock.monotonic())
        reports = [report for one in entered.adopted for report in one.reports]
        missing = unrecorded(reports, last_recorded_step(self.entries), state.step)
        records: list[Command] = [Record(kind="step", fields=report.fields()) for report in missing]
        if entered.adopted:
            records.insert(0, Record(kind="data", fields=arithmetic.data_entry(entered.adopted[0].facts)))
        records.append(entry(state, entered, before=acquired.before))
        return state, [*records, *accepted, *refused, *left], tuple(one.worker for one in entered.adopted)

    def about(self, state: State) -> dict[str, Any]:
        """Fields of this driver's first journal entry: how it began."""
        acquired, source = self._owned(), first_source(state)
        about: dict[str, Any] = {
            "driver": self._claims.writer,
            "run": self._files.name,
            **state.decisions.fields(),
            numerics.KEY: numerics.whole(state.numerics),
            "resumed_after_step": source.step,
            "source": describe_source(source),
            **arithmetic.own_build_seed(state.build_seed, self._files.metadata),
            **arithmetic.own_blocks(state.blocks),
        }
        if acquired.before:
            about |= {"after": acquired.before, "because": acquired.because}
        return {**about, **self._files.metadata}

    def let_go(self) -> None:
        """Release the run, if it was acquired."""
        self._leadership.end(_LET_GO_S)

    def _owned(self) -> AcquiredLease:
        assert self._acquired is not None, "own() comes first"
        return self._acquired

    def _terms(self, acquired: AcquiredLease) -> DriverSession:
        return DriverSession(
            driver=self._claims.writer,
            epoch=acquired.first,
            run_name=self._files.name,
            global_batch_size=self._files.global_batch_size,
            metadata=self._files.metadata,
            signed=self._files.key is not None,
            lease_s=self._lease_s,
            orphan_wait_s=self._orphan_wait_s,
            storage_patience_s=self._files.patience_s,
            identity=self._identity,
            recorded_step=last_recorded_step(self.entries),
            secret=secrets.token_bytes(32),
        )

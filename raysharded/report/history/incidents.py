"""A run's incidents, each as one sentence with its cost. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysharded.display.plain_text import brief
from raysharded.display.quantities import count, listing, size, span
from raysharded.journal.entry_text import incident_text, step_of
from raysharded.journal.log import DAMAGE
from raysharded.journal.records import Recovery

Entry = Mapping[str, Any]
_ERROR = 1000
"""Characters of an error that are shown: its remedy stands at its end."""

FOUND, STOPPED, WAITED, FORMED = "found", "stopped", "waited for workers", "formed"
BUILT, MOVED, AGAIN = "built", "moved", "computed again"
AWAY, STARTED = "without a driver", "started"
COSTS = {
    FOUND: "from the last finished step until the loss was noticed",
    STOPPED: "until every remaining worker had stopped and reported its state",
    WAITED: "until there were enough workers to continue: a replacement had to start",
    FORMED: "until the next members were decided and had met",
    BUILT: "until they had built the model for their new shards",
    MOVED: "until the state had been moved, or read, to where it belongs",
    AGAIN: "steps whose results were lost",
    AWAY: "from the last sign of one driver to the start of the next",
    STARTED: "until the workers of the new driver held the state",
}

KINDS = {
    "worker_lost": "worker",
    "worker_died": "worker",
    "repeated_death": "worker",
    "task_error": "task",
    "worker_leaving": "worker",
    "worker_refused": "worker",
    "start_failed": "worker",
    "stuck": "worker",
    "straggler": "straggler",
    "links_broken": "node",
    "links_mended": "node",
    "node_avoided": "node",
    "node_allowed": "node",
    "node_lost": "node",
    "node_back": "node",
    "drain": "node",
    "gcs_lost": "node",
    "gcs_back": "node",
    "gcs_limit": "node",
    "waiting": "waiting",
    "resize": "resize",
    "taken_over": "driver",
    "orphaned": "driver",
    "step_skipped": "numbers",
    "rewind": "numbers",
    "corruption": "numbers",
    "proof_failed": "numbers",
    "learning_rate": "asked",
    "mixture_weights": "asked",
    "arithmetic": "asked",
    "checkpoint_late": "checkpoint",
    "checkpoint_failed": "checkpoint",
    "checkpoint_skipped": "checkpoint",
    "checkpoints_failing": "checkpoint",
    "storage_failing": "storage",
    "storage_back": "storage",
    "entries_dropped": "storage",
    "chaos": "injected",
    "failed": "failed",
}
"""Kinds of entries that are incidents by themselves -> kind of the incident."""

FAILURES = ("checkpoint_failed", "checkpoints_failing")
"""Kinds about checkpoints that could not be written."""

LETTERS = {
    "recovery": "R",
    "reshard": "M",
    "resumed": "D",
    "driver": "D",
    "worker": "W",
    "straggler": "S",
    "task": "E",
    "node": "N",
    "waiting": "P",
    "resize": "Z",
    "numbers": "!",
    "asked": "A",
    "checkpoint": "C",
    "storage": "T",
    "injected": "X",
    "failed": "F",
}
"""Kinds of incidents -> a letter, for marks in small spaces."""
NAMES = {
    "recovery": "recovery",
    "reshard": "members changed",
    "resumed": "resumed by another driver",
    "driver": "drivers",
    "worker": "a worker",
    "straggler": "straggler",
    "task": "an error of the task",
    "node": "a node",
    "waiting": "too few workers",
    "resize": "another number of workers wanted",
    "numbers": "wrong or non-finite numbers",
    "asked": "requested",
    "checkpoint": "checkpoint",
    "storage": "storage",
    "injected": "injected by chaos",
    "failed": "the run failed",
}
"""Kinds of incidents -> their names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """One part of an incident's cost."""

    name: str
    """A key of COSTS."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """An event of the run that is of interest to people."""

    kind: str
    """The kind: recovery, reshard, resumed, or a value of KINDS."""
    at_s: float
    """Seconds since the run's first entry."""
    step: int
    """The newest finished step at that time; for a loss and its recovery, the one that the lost worker computed; for
    other changes of the members, the first step after them."""
    text: str
    """One sentence. Parts may come from the journal unchanged: escape it for display."""
    costs: tuple[Cost, ...] = ()
    worker: int | None = None

    @property
    def cost_s(self) -> float:
        return sum(cost.seconds for cost in self.costs)


@dataclass(kw_only=True, slots=True)
class Change:
    """A change of the members in progress: from the last step before it to the first step after it. Times are seconds
    since the run's first entry."""

    since_s: float
    """The time when the last step before the change was done."""
    opened_s: float
    """The time of the entry that began the change; steps that ended before it may be reported after it."""
    step: int
    """The last step before the change."""
    before: frozenset[int] | None
    """The members before the change; None if this driver had none yet."""
    after: frozenset[int] = frozenset()
    decided_s: float = 0.0
    formed_s: float = 0.0
    seconds: Mapping[str, float] | None = None
    """Seconds that one worker took to form, by phase."""
    bytes_received: int = 0
    bytes_read: int = 0
    why: str = ""
    source: str = ""
    resumes: bool = False
    """Whether it ends a pause."""


def is_incident(entry: Entry) -> bool:
    """True if the entry is an incident by itself. Workers that take long to start, and lack nothing, are none."""
    return entry["kind"] in KINDS and (entry["kind"] != "waiting" or bool(entry.get("missing")))


def of_entry(entry: Entry, at_s: float, step: int, max_steps: int | None) -> Incident | None:
    """The incident of a single entry; None for most, and for an older version's entry without the needed fields.

    `step`: the newest finished step; `max_steps`: the run's last step, if it is known.
    """
    kind = entry["kind"]
    if not is_incident(entry):
        return None
    try:
        text = incident_text(kind, entry, _ERROR)
        if kind == "failed":
            text = f"the run failed: {brief(entry['error'], _ERROR)}"
        hit = step_of(kind, entry, step, max_steps)
    except DAMAGE:
        return None
    if text is None:
        return None
    worker = entry.get("worker")
    return Incident(
        kind="asked" if entry.get("who") == "asked" else KINDS[kind],
        at_s=at_s,
        step=hit,
        text=_sentence(re.sub(r"^step \d+: ", "", text)),
        worker=worker if isinstance(worker, int) else None,
    )


@dataclass(kw_only=True, slots=True)
class FailedInARow:
    """The checkpoints that failed since the newest committed one, as one line."""

    steps: list[int] = field(default_factory=list)
    newest: int | None = None
    """Step of the newest committed checkpoint, once the driver has reported that there is none since."""

    def add(self, entry: Entry) -> str:
        """Add an entry. Returns the line about all failures in a row; empty for one alone, and for other entries."""
        try:
            return self._added(entry)
        except DAMAGE:  # an older version's entry without the needed fields
            return ""

    def _added(self, entry: Entry) -> str:
        match entry["kind"]:
            case "checkpoint" | "started":
                self.steps.clear()
                self.newest = None
                return ""
            case "checkpoint_failed":
                self.steps.append(int(entry["step"]))
            case "checkpoints_failing":
                self.newest = int(entry["newest"] or 0)
            case _:
                return ""
        if len(self.steps) < 2:
            return ""
        none = ""
        if self.newest is not None:
            none = f": NO CHECKPOINT SINCE STEP {self.newest}" if self.newest else ": NO CHECKPOINT AT ALL"
        first, last = self.steps[0], self.steps[-1]
        what = f"{len(self.steps)} checkpoints in a row, of steps {first} to {last}, could not be written"
        if first == last:
            what = f"the checkpoint of step {first} could not be written, {len(self.steps)} times in a row"
        return _sentence(f"{what}{none}; the last: {brief(str(entry['error']))}")


def of_recovery(recovery: Recovery, change: Change, *, step: int, ended_s: float, lost_s: float) -> Incident:
    """The incident of a loss in `step` and its recovery. `ended_s`: the time when its first step was done; `lost_s`:
    seconds of steps to compute again."""
    found_s = ended_s - recovery.total_s
    costs = [
        Cost(name=FOUND, seconds=max(0.0, found_s - change.since_s)),
        Cost(name=STOPPED, seconds=recovery.abort_s),
        *([Cost(name=WAITED, seconds=recovery.wait_s)] if recovery.wait_s else []),
        *_forming(change, recovery.reshard_s),
        Cost(name=AGAIN, seconds=lost_s),
    ]
    went_on = f"{count(recovery.workers_after, 'worker')} of {recovery.workers_before} went on"
    if recovery.workers_after == recovery.workers_before:
        went_on = f"{count(recovery.workers_after, 'worker')} went on"
    elif recovery.workers_after > recovery.workers_before:
        went_on = f"{recovery.workers_after} workers went on after {recovery.workers_before}"
    text = (
        f"{_what_broke(recovery, step)}{_because(recovery)}; {went_on} with step "
        f"{recovery.resumed_after_step + 1}, the state {_from(recovery.source)}, and "
        f"{count(recovery.steps_redone, 'step') if recovery.steps_redone else 'no step'} had to be computed again"
    )
    return Incident(
        kind="recovery",
        at_s=found_s,
        step=step,
        text=_sentence(f"{text}: {_costs(costs, change)}"),
        costs=tuple(costs),
    )


def lost_in(recovery: Recovery, died: Mapping[int, int], newest: int, max_steps: int | None) -> int:
    """The step in which a recovery's workers were lost: that of the first, if it is known what they died of.

    `died`: worker -> the step of its death, as far as known; `newest`: the newest finished step before the recovery;
    `max_steps`: the run's last step, if it is known. State from memory has all that the lost workers had finished.
    """
    known = [died[worker] for worker in recovery.lost if worker in died]
    if known or (recovery.lost and recovery.source == "memory"):
        return min(known, default=recovery.resumed_after_step + 1)
    return step_of("worker_lost", {}, newest, max_steps)


def of_reshard(change: Change) -> Incident:
    """The incident of a change of members between two steps, without a loss."""
    before, step = change.before or frozenset(), change.step + 1
    joined, left = sorted(change.after - before), sorted(before - change.after)
    news = [f"{_workers(who)} {did}" for who, did in ((left, "left"), (joined, "joined")) if who]
    size_now = count(len(change.after), "worker")
    what = f"{' and '.join(news)} before step {step}, {len(before)} to {size_now}" if news else ""
    what = what or f"{size_now} formed anew before step {step}"
    why = f" ({brief(change.why)})" if change.why else ""
    costs = [
        Cost(name=STOPPED, seconds=max(0.0, change.decided_s - change.since_s)),
        *_forming(change, max(0.0, change.formed_s - change.decided_s)),
    ]
    return Incident(
        kind="reshard",
        at_s=change.since_s,
        step=step,
        text=_sentence(f"{what}{why}, with no step computed again: {_costs(costs, change)}"),
        costs=tuple(costs),
    )


def of_resumption(change: Change, *, ended_s: float, started_s: float, lost_s: float, because: str) -> Incident:
    """The incident of another driver's start. `ended_s`: the previous driver's last sign of life; `started_s`: this
    driver's start."""
    costs = [
        Cost(name=AWAY, seconds=max(0.0, started_s - ended_s)),
        Cost(name=STARTED, seconds=max(0.0, change.formed_s - started_s)),
        Cost(name=AGAIN, seconds=max(0.0, lost_s)),
    ]
    why = f" ({brief(because)})" if because else ""
    text = f"another driver went on with step {change.step + 1}{why}, the state {_from(change.source)}"
    return Incident(
        kind="resumed",
        at_s=ended_s,
        step=change.step + 1,
        text=_sentence(f"{text}: {_costs(costs, change)}"),
        costs=tuple(costs),
    )


def costliest(incidents: Sequence[Incident], limit: int) -> list[int]:
    """The indices of at most `limit` incidents, ascending: those with the highest cost, then the newest without a
    cost."""
    ranked = sorted(range(len(incidents)), key=lambda index: (incidents[index].cost_s, index), reverse=True)
    return sorted(ranked[:limit])


def _forming(change: Change, total_s: float) -> list[Cost]:
    """`total_s` in parts: one worker's times for building and moving, and the rest."""
    seconds = change.seconds or {}
    built = min(total_s, seconds.get("build", 0.0))
    moved = min(total_s - built, seconds.get("reshard", 0.0) + seconds.get("load", 0.0))
    parts = ((FORMED, total_s - built - moved), (BUILT, built), (MOVED, moved))
    return [Cost(name=name, seconds=part) for name, part in parts]


def _costs(costs: Sequence[Cost], change: Change) -> str:
    """ "1.3 s in all: found 0.2 s, built 0.9 s, ..."."""
    parts = [f"{cost.name} {span(cost.seconds)}{_how_much(cost, change)}" for cost in costs if cost.seconds >= 0.0005]
    total = span(sum(cost.seconds for cost in costs))
    return f"{total} ({', '.join(parts)})" if parts else total


def _how_much(cost: Cost, change: Change) -> str:
    moved = change.bytes_received + change.bytes_read
    return f" for {size(moved)}" if cost.name == MOVED and moved else ""


def _what_broke(recovery: Recovery, step: int) -> str:
    if not recovery.lost:
        return f"step {step} was broken off, with no worker lost"
    return f"{_workers(recovery.lost)} {'was' if len(recovery.lost) == 1 else 'were'} lost in step {step}"


def _because(recovery: Recovery) -> str:
    reasons = list(dict.fromkeys(_without_stop(brief(reason)) for reason in recovery.reasons if reason))
    told = [reason for reason in reasons if not any(reason in other for other in reasons if other != reason)]
    return f" ({'; '.join(told[:3])})" if told else ""


def _from(source: str) -> str:
    words = {"memory": "from memory", "start": "drawn anew", "checkpoint": "from a checkpoint"}
    return words.get(source, f"from {brief(source)}")


def _workers(workers: Sequence[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {listing([str(worker) for worker in workers])}"


def _sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    text = _without_stop(" ".join(text.split()))
    return f"{text[:1].upper()}{text[1:]}." if text else text


def _without_stop(text: str) -> str:
    """The text without its last full stop, and without the dots of `brief` for sentences that are left out."""
    return text.removesuffix(" ...").rstrip(".")

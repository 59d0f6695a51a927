"""A run's members and newest incidents, from the end of its journal."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raysharded.checkpoint import Storage
from raysharded.checkpoint.format.limits import MAX_NUMBER
from raysharded.checkpoint.format.signed_json import MAX_SECONDS
from raysharded.journal import log
from raysharded.journal.entry_text import below_maximum_text, incident_text
from raysharded.report.history import incidents

_SEGMENTS = 128
"""Number of segments to read: ten minutes of a short run, an hour of a long one."""
_AT_ONCE = 16
_INCIDENTS = 5
_OLDER = 4096
"""Number of segments before them that are searched for the newest members and their processes: a day and more."""


_OF_WORKERS = (b'"generation"', b'"worker_ready"', b'"started"', b'"below_maximum"', b'"resize"')
"""Parts of such segments as have entries about the newest members."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Starting:
    """The workers of a driver before its first generation."""

    ready: int
    """Number of workers that are ready."""
    needed: int | None
    """Least number of workers of the run; None: unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recent:
    """The content of the newest segments."""

    members: tuple[int, ...]
    """Workers of the newest generation that are not lost, by rank; empty if it is far older than the segments read.
    While `starting`, it is an earlier driver's."""
    starting: Starting | None
    """The workers of a driver that has decided no generation yet; None: the newest driver has."""
    generation: int | None
    below_maximum: str
    """Sentences about the workers that this generation would take in addition; empty: none, or unknown."""
    pids: Mapping[int, int]
    """Member -> process id on its node, as far as known."""
    nodes: Mapping[int, str]
    """Member -> the host name of its node, as far as known."""
    ready_at: Mapping[int, float]
    """Member -> the time when it was ready, by the driver's clock."""
    step_s: float | None
    """Wall time per step, over the newest consecutive steps of one generation."""
    incidents: tuple[tuple[float, str], ...]
    """The newest few incidents, oldest first: seconds since 1970, and one sentence."""
    last_segment: int
    """Number of the last segment; 0 if there is none."""


def read_recent(storage: Storage) -> Recent:
    """The recent history. Unreadable entries are ignored. Raises StorageError."""
    return RecentReader(storage).read()


class RecentReader:
    """Reads the recent history again and again: every segment once. Not thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._window: deque[list[dict[str, Any]]] = deque(maxlen=_SEGMENTS)
        """Entries of the newest segments."""
        self._last_key = ""
        self._workers = _Workers()

    def read(self) -> Recent:
        """The recent history now, as `read_recent`."""
        keys = log.segment_keys(self._storage)
        is_first = not self._last_key
        for part in self._read([key for key in keys if key > self._last_key][-_SEGMENTS:]):
            self._window.append(entries_of(part))
            for entry in self._window[-1]:
                self._workers.add(entry)
        self._last_key = keys[-1] if keys else ""
        if is_first:
            self._look_back(keys[:-_SEGMENTS])
        return self._recent()

    def entries(self) -> list[dict[str, Any]]:
        """The entries of the newest segments, oldest first, as of the last `read`."""
        return [entry for entries in self._window for entry in entries]

    def _recent(self) -> Recent:
        found = self.entries()
        happened = _happened(found)
        workers = self._workers
        generation, formed = workers.generation or (None, ())
        members = tuple(member for member in formed if member not in workers.lost)
        known = {member: workers.ready[member] for member in members if member in workers.ready}
        return Recent(
            members=members,
            starting=workers.starting(),
            generation=generation,
            below_maximum=workers.below_maximum,
            pids={member: pid for member, (pid, _, _) in known.items()},
            nodes={member: node for member, (_, node, _) in known.items()},
            ready_at={member: at for member, (_, _, at) in known.items()},
            step_s=_step_s(found),
            incidents=tuple(happened[-_INCIDENTS:]),
            last_segment=int(self._last_key.rpartition("/")[2].split(".")[0]) if self._last_key else 0,
        )

    def _look_back(self, keys: Sequence[str]) -> None:
        """Find the members and their processes in older segments, if they are not known."""
        for last in range(len(keys), max(0, len(keys) - _OLDER), -_SEGMENTS):
            generation = self._workers.generation
            if generation is not None and self._workers.ready.keys() >= set(generation[1]):
                return
            for part in reversed(self._read(keys[max(0, last - _SEGMENTS) : last])):
                if any(kind in part for kind in _OF_WORKERS):
                    self._workers = self._workers.after(entries_of(part))

    def _read(self, keys: Sequence[str]) -> list[bytes]:
        with ThreadPoolExecutor(_AT_ONCE, "raysharded-journal") as pool:
            return list(pool.map(self._read_one, keys))

    def _read_one(self, key: str) -> bytes:
        try:
            return log.read_segment(self._storage, key)
        except log.DamagedJournal:
            return b""


class _Workers:
    """The workers of a part of the journal: the newest generation, the processes, and who is ready without one."""

    def __init__(self) -> None:
        self.generation: tuple[int, tuple[int, ...]] | None = None
        """The newest generation, and its members."""
        self.ready: dict[int, tuple[int, str, float]] = {}
        """Worker -> its process id, its node, and the time when it was ready last."""
        self.lost: set[int] = set()
        """Workers that were lost, or left, since it was decided."""
        self.below_maximum = ""
        """The workers that it would take in addition, and what they lack."""
        self._is_starting: bool | None = None
        """Whether the newest driver has decided no generation; None: its start is not in this part."""
        self._needed: int | None = None
        self._joined: set[int] = set()
        """Workers that became ready since the newest driver began, and have not left."""
        self._left: set[int] = set()

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add an entry that is newer than all others."""
        with suppress(*log.DAMAGE):
            match entry["kind"]:
                case "started":
                    self._is_starting, self._needed, self._joined, self._left = True, _needed(entry), set(), set()
                case "taken_over":
                    self._joined |= set(map(int, entry["workers"]))
                case "worker_ready":
                    worker = int(entry["worker"])
                    self.ready[worker] = int(entry["pid"]), str(entry["node"]), float(entry["at"])
                    self._joined.add(worker)
                case "worker_lost" | "worker_left" | "worker_refused":
                    self._joined.discard(int(entry["worker"]))
                    self._left.add(int(entry["worker"]))
                    self.lost.add(int(entry["worker"]))
                case "generation":
                    self.generation = int(entry["generation"]), tuple(map(int, entry["members"]))
                    self._is_starting, self.below_maximum, self.lost = False, "", set()
                case "below_maximum":
                    self.below_maximum = below_maximum_text(entry)
                case "resize":
                    self.below_maximum = ""

    def after(self, entries: Sequence[Mapping[str, Any]]) -> _Workers:
        """These workers, after older entries."""
        whole = _Workers()
        for entry in entries:
            whole.add(entry)
        whole.below_maximum = self.below_maximum if self.generation else self.below_maximum or whole.below_maximum
        whole.lost = self.lost if self.generation else self.lost | whole.lost
        whole.generation = self.generation or whole.generation
        whole.ready |= self.ready
        if self._is_starting is None:
            whole._joined = (whole._joined - self._left) | self._joined
        else:
            whole._is_starting, whole._needed, whole._joined = self._is_starting, self._needed, self._joined
        whole._left |= self._left
        return whole

    def starting(self) -> Starting | None:
        return Starting(ready=len(self._joined), needed=self._needed) if self._is_starting else None


def _needed(entry: Mapping[str, Any]) -> int | None:
    """The least number of workers, from a driver's first entry."""
    scaling = entry.get("scaling")
    return int(scaling["num_workers"][0]) if isinstance(scaling, dict) and "num_workers" in scaling else None


def entries_of(segment: bytes) -> list[dict[str, Any]]:
    """The entries of a segment, oldest first, without its head, a torn last line and lines that no driver wrote."""
    found = []
    for line in segment.decode(errors="replace").split("\n")[:-1]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and _is_kind(entry.get("kind")) and _is_time(entry.get("at")):
            found.append(entry)
    return found


def _happened(entries: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    """Times and lines of the incidents, oldest first; checkpoints that failed in a row are one."""
    found: list[tuple[float, str]] = []
    failed, is_failure = incidents.FailedInARow(), False
    for entry in entries:
        line = incident_line(entry)
        row = failed.add(entry)
        if line is not None and row:
            line = row
            if is_failure:
                found.pop()
        if line is not None:
            found.append((float(entry["at"]), line))
            is_failure = entry["kind"] in incidents.FAILURES
    return found


def _is_kind(value: object) -> bool:
    return isinstance(value, str) and value != "segment"


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= MAX_SECONDS


def incident_line(entry: Mapping[str, Any]) -> str | None:
    """The sentence for an incident; None for other entries, and for those without the needed fields."""
    if entry["kind"] != "recovery" and not incidents.is_incident(entry):
        return None
    try:
        return incident_text(entry["kind"], entry)
    except log.DAMAGE:
        return None


def _step_s(entries: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds per step of the newest steps since the last start of a generation."""
    done: list[tuple[int, float]] = []
    for entry in reversed(entries):
        if entry["kind"] in ("generation", "started", "rewind"):
            break
        if entry["kind"] == "step":
            with suppress(*log.DAMAGE):
                done.append((int(entry["step"]), float(entry["at"])))
    if len(done) < 2 or not 0 < done[0][0] - done[-1][0] <= MAX_NUMBER:
        return None
    return max(0.0, done[0][1] - done[-1][1]) / (done[0][0] - done[-1][0])
